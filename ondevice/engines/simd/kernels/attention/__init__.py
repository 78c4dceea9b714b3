"""Attention of a forward's rows over the KV cache of their sequence, and the steps of a plan that run it.

In: queries, keys and values float32 from a projection, and the caches. Out: activations for the output projection.

    query_key_value   head norm and rotation of queries and keys; writes keys and values to the cache
    exact             attention over all positions: how pairs of row and head are shared among threads. Read this first
    scratch           which positions a row sees, working memory, and softmax states that can be continued
    float_cache, float_tile      a block of positions of an fp16 cache, and its two products in float32
    integer_cache, integer_tile  a block of positions of an int8 cache, and its two products in integers; its layout
    key_codes, lookup, chosen    lookup attention: 4-bit codes of keys, the choice of positions by them, attention to
        these
"""
