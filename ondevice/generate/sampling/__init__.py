"""From rows of logits to tokens: biases and penalties, filters, constraints, and draws that no draft changes.

In: float32[V], a row of logits, with the tokens before it. Out: the token that follows, or a drafter's guesses of it.

    sampler     `Sampler`, all that the loop and drafters ask; read this first. Also `Adjustments` and `Logprobs`
    row_draw    temperature, filters and draw of a row in one call, from Python or from the engine
    filters     top-k, top-p and min-p
    peaks       the largest scores of blocks, with which both leave out most of a row
    gumbel      noise that is a function of seed, position and token, and the draw with it
    counts      how often tokens occur in the text, for penalties
    masks       the tokens that a constraint allows
    elementary  exponential and logarithm with the same bits on every CPU
"""
