"""The APIs of the server: a file for each, which reads its requests and writes its responses.

`openai.py` is the first to read: `read_chat_completion` makes a `CompletionRequest` of a request's fields, and
`ChatCompletionWriter` writes the replies. anthropic.py, responses.py and ollama.py do the same for their APIs.
blocks.py is what these share, and cards.py describes models in OpenAI's and Anthropic's form.
"""
