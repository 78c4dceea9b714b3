"""The paths of the server, and the way of a request from HTTP to its response (`Endpoints.generate`)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ondevice import __version__
from ondevice.bundle import CHAT_TEMPLATE, Bundle
from ondevice.errors import shown
from ondevice.generate.drafters import registry
from ondevice.model import Model
from ondevice.server.anthropic import count_tokens, read_message
from ondevice.server.bodies import Bodies
from ondevice.server.delivery import (
    CLIENT_LEFT,
    MakeWriter,
    ResponseWriter,
    deliver,
    json_response,
    unless_disconnected,
)
from ondevice.server.guard import Guard, Rules
from ondevice.server.metrics import Metrics
from ondevice.server.model_manager import ModelManager
from ondevice.server.openai import read_chat_completion, read_completion
from ondevice.server.page import page_routes
from ondevice.server.replies import AdmissionQueue, Replies
from ondevice.server.requests import CompletionRequest, Fields, RequestError
from ondevice.server.responses import read_response
from ondevice.text.codec import check_characters
from ondevice.text.tokenizer import Tokenizer

LEAST_TOKENS = 1 << 16
"""Token ids that `/detokenize` takes even if the context is shorter."""

Endpoint = Callable[[Request], Awaitable[Response]]
ReadRequest = Callable[[Fields], tuple[CompletionRequest, MakeWriter]]
"""Reads a request of one API: what it asks of the model, and what makes the writer of its response."""
Query = Callable[[Model, Fields], dict[str, Any]]
"""Answers a request that generates nothing."""


class Begun(NamedTuple):
    """A request that was read.

    names : of its fields, for errors
    """

    replies: Replies
    writer: ResponseWriter
    stream: bool
    names: Collection[str]


def make_app(bundle: Bundle, manager: ModelManager, queue: AdmissionQueue, metrics: Metrics, rules: Rules) -> ASGIApp:
    """The ASGI application."""
    endpoints = Endpoints(bundle, manager, queue, metrics)
    routes = [
        *page_routes(),
        Route("/health", endpoints.health),
        Route("/v1/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.generate(read_chat_completion), methods=["POST"]),
        Route("/v1/completions", endpoints.generate(read_completion), methods=["POST"]),
        Route("/v1/responses", endpoints.generate(read_response), methods=["POST"]),
        Route("/v1/messages", endpoints.generate(read_message), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoints.query(count_tokens), methods=["POST"]),
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
    """What answers each path. `generate` and `query` make endpoints, the other methods are endpoints.

    Nothing of a request's size runs on the event loop: `Bodies` parses in a thread of its own, and
    `AdmissionQueue.work` does the rest in others. A client that disconnects meanwhile ends its request.
    """

    def __init__(self, bundle: Bundle, manager: ModelManager, queue: AdmissionQueue, metrics: Metrics) -> None:
        self._bundle = bundle
        self._bodies = Bodies()
        self._manager = manager
        self._queue = queue
        self._metrics = metrics
        self._created = int(time.time())

    def generate(self, read_request: ReadRequest) -> Endpoint:
        """The endpoint of an API that generates."""

        async def answer(request: Request) -> Response:
            begun = await self._begin(request, read_request)
            if begun is None:
                return Response(status_code=CLIENT_LEFT)
            try:
                return await deliver(request, begun.replies, begun.writer, begun.stream)
            except Exception as error:
                raise RequestError.of(error, begun.names) from None

        return answer

    def query(self, answer_query: Query) -> Endpoint:
        """An endpoint that needs the model but generates nothing. It is admitted as if it generated."""

        async def answered(fields: Fields) -> Response:
            self._manager.check_loaded_once()
            self._queue.enter()
            try:
                async with self._manager.borrow() as model:
                    return await self._queue.work(lambda: json_response(answer_query(model, fields)))
            finally:
                self._queue.leave()

        async def answer(request: Request) -> Response:
            async with self._bodies.receive(request) as fields:
                try:
                    response = await unless_disconnected(request.receive, answered(fields))
                except Exception as error:
                    raise RequestError.of(error, fields) from None  # it may be that error itself
            return Response(status_code=CLIENT_LEFT) if response is None else response

        return answer

    async def _begin(self, request: Request, read_request: ReadRequest) -> Begun | None:
        """Read a request and prepare its replies; None if the client disconnects. Then its body is no longer needed."""

        async def begin(fields: Fields) -> Begun:
            stream = fields.flag("stream")
            asked, make_writer = await self._queue.work(read_request, fields)
            replies = await Replies.begin(asked, self._manager, self._queue, self._metrics)
            return Begun(replies, make_writer(replies.model, replies.choices), stream, frozenset(fields))

        async with self._bodies.receive(request) as fields:
            try:
                return await unless_disconnected(request.receive, begin(fields))
            except Exception as error:
                raise RequestError.of(error, fields) from None  # it may be that error itself

    async def health(self, request: Request) -> Response:
        self._manager.check_loaded_once()
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._bundle.manifest.name:
            raise RequestError(404, f"no model {shown(name)} here, only {self._bundle.manifest.name!r}")
        return JSONResponse(self._model_card())

    async def props(self, request: Request) -> Response:
        """llama.cpp's names as far as they fit, then names of this server."""
        template, manifest = self._bundle.file(CHAT_TEMPLATE), self._bundle.manifest
        async with self._manager.borrow() as model:
            defaults = model.defaults
            properties = {
                "model_alias": manifest.name,
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
            }
        return JSONResponse(properties)

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.text(self._queue.running, self._queue.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _model_card(self) -> dict[str, Any]:
        """OpenAI's `model` object, with llama.cpp's `meta`."""
        manifest, model = self._bundle.manifest, self._manager.model
        return {
            "id": manifest.name,
            "object": "model",
            "created": self._created,
            "owned_by": "ondevice",
            "meta": {
                "n_vocab": manifest.target.vocab_size,
                "n_ctx_train": manifest.target.context_length,
                "n_ctx": None if model is None else model.context_length,
                "size": sum(entry.size for entry in manifest.files.values()),
            },
        }


def tokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """llama.cpp's `/tokenize`: token ids of a text; `with_pieces` adds the text of each token."""
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
        return {"tokens": [{"id": each, "piece": tokenizer.text_of(each)} for each in ids]}
    return {"tokens": ids}


def detokenize(model: Model, fields: Fields) -> dict[str, Any]:
    """llama.cpp's `/detokenize`: the text of token ids, control tokens included."""
    fields.required("tokens")
    tokens = fields.array("tokens")
    if len(tokens) > (longest := max(LEAST_TOKENS, model.context_length)):
        raise RequestError(400, f"tokens has {len(tokens)} token ids: {longest} are possible", param="tokens")
    most = model.manifest.target.vocab_size - 1
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= most for each in tokens):
        raise RequestError(400, f"tokens must be token ids from 0 to {most}", param="tokens")
    return {"content": _tokenizer(model).decode(tokens, keep_special=True)}


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


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # never received
