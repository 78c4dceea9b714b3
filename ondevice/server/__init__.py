"""The HTTP server of `ondevice serve`: the APIs of OpenAI, Anthropic, Ollama and llama.cpp over several models.

In: HTTP requests with JSON bodies. Out: one JSON object, or a stream of events. The way of a chat completion:

1. app.py: paths and endpoints. `Endpoints.generate` is the whole way of a request in ten lines.
2. apis/openai.py: `read_chat_completion` reads this API's own fields, `ChatCompletionWriter` writes its response. The
   other files of apis/ do the same for theirs.
3. requests.py: `RequestFields` checks a JSON body, `read_request` makes a `CompletionRequest`, `RequestError` is any
   refusal.
4. replies.py: `AdmissionQueue` admits the request, `Replies` generates its choices and yields events.
5. delivery.py: `ResponseWriter` turns events into JSON, `deliver` sends it, and cancels when the client disconnects.

Around it: running.py (socket, signals), guard.py (hosts, origins, API key), model_manager.py (names, load, unload),
background.py (replies without a client), metrics.py, page.py. Imports go one way: running, app, background, the APIs,
delivery, replies, model_manager and metrics, requests.
"""
