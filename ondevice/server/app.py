"""The paths of the server, and the way of a request from HTTP to its response (`Endpoints.generate`)."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ondevice import __version__
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.errors import shown
from ondevice.generate.drafters import registry
from ondevice.model import Model
from ondevice.server.apis import ollama
from ondevice.server.apis.anthropic import count_tokens, read_message
from ondevice.server.apis.cards import anthropic_card, anthropic_list, openai_card
from ondevice.server.apis.openai import read_chat_completion, read_completion
from ondevice.server.apis.responses import OpenAIResponseWriter, count_input_tokens, read_response
from ondevice.server.background import Background
from ondevice.server.bodies import Bodies
from ondevice.server.delivery import (
    CLIENT_LEFT,
    EventStream,
    MakeWriter,
    ResponseWriter,
    deliver,
    json_response,
    unless_disconnected,
)
from ondevice.server.guard import Guard, Rules
from ondevice.server.metrics import Metrics
from ondevice.server.model_manager import ModelManager, Models
from ondevice.server.page import page_routes
from ondevice.server.replies import AdmissionQueue, Replies
from ondevice.server.requests import CompletionRequest, RequestError, RequestFields, as_request_error
from ondevice.text.codec import check_characters
from ondevice.text.tokenizer import Tokenizer

NUMBER = re.compile(r"\d{1,9}")
"""The number of an event."""

MIN_TOKENS = 1 << 16
"""Token ids that `/detokenize` takes even if the context is shorter."""

ANTHROPIC_VERSION = "anthropic-version"
"""A header of Anthropic's clients. `/v1/models` is a path of OpenAI's API too."""

NOT_HERE = {"/v1/embeddings": ollama.NOT_HERE["/api/embed"], **ollama.NOT_HERE}
"""Paths that clients ask for, and why they are not served."""

Endpoint = Callable[[Request], Awaitable[Response]]
ReadRequest = Callable[[RequestFields], tuple[CompletionRequest, MakeWriter]]
"""Reads a request of one API: what it asks of the model, and what makes the writer of its response."""
Query = Callable[[Model, RequestFields], dict[str, Any]]
"""Answers a request that generates nothing."""
Description = Callable[[ModelManager, RequestFields], dict[str, Any]]
"""Answers a request about a model that need not be in memory."""
About = TypeVar("About", Model, ModelManager)


class Begun(NamedTuple):
    """A request that was read.

    names : of its fields, for errors
    """

    replies: Replies
    writer: ResponseWriter
    stream: bool
    names: Collection[str]
    background: bool


def make_app(models: Models, queue: AdmissionQueue, metrics: Metrics, rules: Rules) -> ASGIApp:
    """The ASGI application."""
    endpoints = Endpoints(models, queue, metrics)
    routes = [
        *page_routes(),
        Route("/health", endpoints.health),
        Route("/v1/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.generate(read_chat_completion), methods=["POST"]),
        Route("/v1/completions", endpoints.generate(read_completion), methods=["POST"]),
        Route("/v1/responses", endpoints.generate(read_response), methods=["POST"]),
        Route("/v1/responses/input_tokens", endpoints.query(count_input_tokens), methods=["POST"]),
        Route("/v1/responses/{id}", endpoints.response),
        Route("/v1/responses/{id}", endpoints.delete_response, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", endpoints.cancel_response, methods=["POST"]),
        Route("/v1/messages", endpoints.generate(read_message), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoints.query(count_tokens), methods=["POST"]),
        Route("/api/chat", endpoints.generate(ollama.read_chat, streams=True), methods=["POST"]),
        Route("/api/generate", endpoints.generate(ollama.read_generate, streams=True), methods=["POST"]),
        Route("/api/show", endpoints.describe(ollama.show), methods=["POST"]),
        Route("/api/tags", endpoints.tags),
        Route("/api/ps", endpoints.running),
        Route("/api/version", endpoints.version),
        *(Route(path, _not_here, methods=["POST", "DELETE"]) for path in NOT_HERE),
        Route("/tokenize", endpoints.query(tokenize), methods=["POST"]),
        Route("/detokenize", endpoints.query(detokenize), methods=["POST"]),
        Route("/props", endpoints.props),
        Route("/metrics", endpoints.metrics),
    ]
    handlers = {
        RequestError: _refused,
        HTTPException: _refused,
        ClientDisconnect: _disconnected,
        Exception: _refused,
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), rules)


class Endpoints:
    """The function that answers each path. `generate`, `query` and `describe` make endpoints, the other public methods
    are endpoints.

    Nothing of a request's size runs on the event loop: `Bodies` parses in a thread of its own, and
    `AdmissionQueue.work` does the rest in others. A client that disconnects meanwhile ends its request.
    """

    def __init__(self, models: Models, queue: AdmissionQueue, metrics: Metrics) -> None:
        self._models = models
        self._bodies = Bodies()
        self._queue = queue
        self._metrics = metrics
        self._background = Background()
        self._created = int(time.time())

    def generate(self, read_request: ReadRequest, *, streams: bool = False) -> Endpoint:
        """The endpoint of an API that generates; `streams` is the default of its field `stream`."""

        async def answer(request: Request) -> Response:
            begun = await self._begin(request, read_request, streams=streams)
            if isinstance(begun, Response):
                return begun
            if begun.background:
                return await self._begin_in_background(begun)
            with as_request_error(begun.names):
                return await deliver(request, begun.replies, begun.writer, begun.stream)

        return answer

    def query(self, answer_query: Query) -> Endpoint:
        """An endpoint that needs the model but generates nothing. It is admitted as if it generated."""

        async def answered(fields: RequestFields) -> Response:
            manager = self._find(fields)
            self._queue.enter()
            try:
                async with manager.lend() as model:
                    return await self._queue.work(_answered, answer_query, model, fields)
            finally:
                self._queue.leave()

        return partial(self._answer, answered)

    def describe(self, answer_query: Description) -> Endpoint:
        """An endpoint that describes a model, which need not be in memory."""

        async def answered(fields: RequestFields) -> Response:
            manager = self._models.find(fields.text("model") or fields.text("name"))
            return await self._queue.work(_answered, answer_query, manager, fields)

        return partial(self._answer, answered)

    async def _answer(
        self, answered: Callable[[RequestFields], Coroutine[Any, Any, Response]], request: Request
    ) -> Response:
        """The response to a request that generates nothing."""
        async with self._bodies.receive(request) as fields:
            with as_request_error(fields):
                response = await unless_disconnected(request.receive, answered(fields))
        return Response(status_code=CLIENT_LEFT) if response is None else response

    async def _begin(self, request: Request, read_request: ReadRequest, *, streams: bool) -> Begun | Response:
        """Read a request and prepare its replies, after which its body is no longer needed; or else its response, where
        the client disconnects or a model is to be unloaded that is not in memory.
        """

        async def begin(fields: RequestFields) -> Begun | Response:
            manager, stream = self._find(fields), fields.flag("stream") if "stream" in fields else streams
            asked, make_writer = await self._queue.work(_read, read_request, fields)
            if asked.absent is not None and manager.model is None and manager.loading is None:
                return JSONResponse(asked.absent(manager.name))
            replies = await Replies.begin(asked, manager, self._queue, self._metrics)
            writer = make_writer(replies.model, manager.name, replies.choices)
            return Begun(replies, writer, stream, frozenset(fields), asked.background)

        async with self._bodies.receive(request) as fields:
            with as_request_error(fields):
                begun = await unless_disconnected(request.receive, begin(fields))
        return Response(status_code=CLIENT_LEFT) if begun is None else begun

    async def _begin_in_background(self, begun: Begun) -> Response:
        assert isinstance(begun.writer, OpenAIResponseWriter)  # the only API with such replies
        response = await self._background.begin(begun.replies, begun.writer)
        if begun.stream:
            return EventStream(response.follow(-1), begun.writer.media_type)
        return await self._queue.work(json_response, response.whole())

    async def response(self, request: Request) -> Response:
        """A background response as far as it is written, or its events after one of a number."""
        response = self._background.find(request.path_params["id"])
        query, last = request.query_params, request.headers.get("last-event-id")
        after = query.get("starting_after", last)
        if last is None and query.get("stream", "false") != "true":
            return await self._queue.work(json_response, response.whole())
        if after is not None and not NUMBER.fullmatch(after):
            raise RequestError(400, f"starting_after must be the number of an event, not {shown(after)}")
        return EventStream(response.follow(-1 if after is None else int(after)), OpenAIResponseWriter.media_type)

    async def cancel_response(self, request: Request) -> Response:
        response = await self._background.cancel(request.path_params["id"])
        return await self._queue.work(json_response, response.whole())

    async def delete_response(self, request: Request) -> Response:
        await self._background.delete(request.path_params["id"])
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    def _find(self, fields: RequestFields) -> ModelManager:
        """The model that a request names.

        Raises:
            RequestError: there is none of this name, or the server starts.
        """
        manager = self._models.find(fields.text("model"))
        manager.check_started()
        return manager

    async def health(self, request: Request) -> Response:
        self._models.first.check_started()
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(anthropic_list(self._models, self._created))
        return JSONResponse({"object": "list", "data": [openai_card(each, self._created) for each in self._models]})

    async def model(self, request: Request) -> Response:
        card = anthropic_card if ANTHROPIC_VERSION in request.headers else openai_card
        return JSONResponse(card(self._models.find(request.path_params["name"]), self._created))

    async def props(self, request: Request) -> Response:
        """llama.cpp's names as far as they fit, then names of this server. `?model=NAME` for another than the first."""
        manager = self._models.find(request.query_params.get("model"))
        manager.check_started()
        template, manifest = manager.bundle.file(CHAT_TEMPLATE), manager.bundle.manifest
        async with manager.lend() as model:
            defaults = model.defaults
            properties = {
                "model_alias": manager.name,
                "build_info": f"ondevice {__version__}",
                "total_slots": self._queue.slots,
                "chat_template": "" if template is None else template.read_text("utf-8"),
                "modalities": {"vision": manifest.vision is not None, "audio": manifest.audio is not None},
                "default_generation_settings": {
                    "n_ctx": model.context_length,
                    "params": {
                        "temperature": defaults.temperature,
                        "top_k": defaults.top_k,
                        "top_p": defaults.top_p,
                        "min_p": defaults.min_p,
                        "repeat_penalty": defaults.repetition_penalty,
                        "n_predict": -1,
                    },
                },
                "engine": model.engine.name,
                "drafters": [*registry.offered(model.engine), registry.NONE],
                "kv_cache": model.engine.kv_cache,
                "threads": model.threads,
                "load_s": model.load_s,
                "models": [each.name for each in self._models],
                "capabilities": manager.capabilities,
            }
        return JSONResponse(properties)

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": [ollama.tag(each) for each in self._models]})

    async def running(self, request: Request) -> Response:
        return JSONResponse({"models": [ollama.running(each) for each in self._models if each.model is not None]})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": ollama.VERSION})

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.text(self._queue.running, self._queue.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _read(read_request: ReadRequest, fields: RequestFields) -> tuple[CompletionRequest, MakeWriter]:
    """Read a request, of which no field may be left."""
    found = read_request(fields)
    fields.refuse_rest()
    return found


def tokenize(model: Model, fields: RequestFields) -> dict[str, Any]:
    """llama.cpp's `/tokenize`: token ids of a text; `with_pieces` adds the text of each token, or a list of its bytes
    where they are no UTF-8.
    """
    fields.required("content")
    text = fields.text("content") or ""
    check_characters(len(text), model.context_length)
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(
        text,
        add_special_tokens=fields.flag("add_special"),
        parse_special=fields.flag("parse_special") if "parse_special" in fields else True,
    )
    if fields.flag("with_pieces"):
        return {"tokens": [{"id": each, "piece": _piece(tokenizer.token_bytes(each))} for each in ids]}
    return {"tokens": ids}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenize(model: Model, fields: RequestFields) -> dict[str, Any]:
    """llama.cpp's `/detokenize`: the text of token ids, control tokens included."""
    fields.required("tokens")
    tokens = fields.array("tokens")
    if len(tokens) > (longest := max(MIN_TOKENS, model.context_length)):
        raise RequestError(400, f"tokens has {len(tokens)} token ids: {longest} are possible", param="tokens")
    most = model.manifest.target.vocab_size - 1
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= most for each in tokens):
        raise RequestError(400, f"tokens must be token ids from 0 to {most}", param="tokens")
    return {"content": _tokenizer(model).decode(tokens, keep_special=True)}


def _answered(
    answer_query: Callable[[About, RequestFields], dict[str, Any]], about: About, fields: RequestFields
) -> Response:
    """The response to a request about a model, of which no field may be left."""
    response = json_response(answer_query(about, fields))
    fields.refuse_rest()
    return response


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise RequestError(400, "this bundle has no tokenizer")
    return model.tokenizer


async def _refused(request: Request, error: Exception) -> Response:
    """The response to any exception. Starlette's own are: no such path, or the wrong method."""
    path, headers = request.url.path, {}
    if isinstance(error, HTTPException):
        lost = error.status_code == 404
        message = f"no such path: {shown(path)}" if lost else f"{path} does not accept {request.method}"
        error, headers = RequestError(error.status_code, message), error.headers
    refusal = RequestError.of(error)
    return JSONResponse(refusal.body(path), refusal.status, {**refusal.headers, **(headers or {})})


async def _not_here(request: Request) -> Response:
    raise RequestError(404, NOT_HERE[request.url.path])


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # never received
