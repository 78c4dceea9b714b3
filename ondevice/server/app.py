"""The paths of the server and what answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ondevice.model import Model
from ondevice.server import chat_completions, completions, messages, responses, status, tokens
from ondevice.server.delivery import CLIENT_LEFT, as_request_error
from ondevice.server.fields import Fields, read_fields
from ondevice.server.guard import Guard, Rules
from ondevice.server.page import page_routes
from ondevice.server.request_error import RequestError
from ondevice.server.service import Service
from ondevice.server.shape import now


def make_app(service: Service, rules: Rules) -> ASGIApp:
    """The ASGI application."""
    endpoints = _Endpoints(service)
    routes = [
        *page_routes(),
        Route("/health", endpoints.health),
        Route("/v1/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/responses", endpoints.responses, methods=["POST"]),
        Route("/v1/messages", endpoints.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoints.count_tokens, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/props", endpoints.props),
        Route("/metrics", endpoints.metrics),
    ]
    handlers = {RequestError: _refused, HTTPException: _not_found, ClientDisconnect: _left, Exception: _failed}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), rules)


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = now()

    async def health(self, request: Request) -> Response:
        self._service.residence.check_loaded_once()
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [status.model_card(self._service, self._created)]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._service.name:
            raise RequestError(404, f"there is no model {name!r:.99} here, only {self._service.name!r}")
        return JSONResponse(status.model_card(self._service, self._created))

    async def chat_completions(self, request: Request) -> Response:
        return await self._service.answer(request, chat_completions.read)

    async def completions(self, request: Request) -> Response:
        return await self._service.answer(request, completions.read)

    async def responses(self, request: Request) -> Response:
        return await self._service.answer(request, responses.read)

    async def messages(self, request: Request) -> Response:
        return await self._service.answer(request, messages.read)

    async def count_tokens(self, request: Request) -> Response:
        return await self._with_model(request, messages.count_tokens)

    async def tokenize(self, request: Request) -> Response:
        return await self._with_model(request, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._with_model(request, tokens.detokenize)

    async def props(self, request: Request) -> Response:
        async with self._service.residence.model_at_hand() as model:
            return JSONResponse(status.props(self._service, model))

    async def metrics(self, request: Request) -> Response:
        places = self._service.places
        text = self._service.metrics.text(places.busy, places.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _with_model(self, request: Request, make: Callable[[Model, Fields], dict[str, Any]]) -> Response:
        fields = await read_fields(request)
        try:
            async with self._service.residence.model_at_hand() as model:
                return JSONResponse(make(model, fields))
        except Exception as error:
            raise as_request_error(error, fields) from error


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(request.url.path), error.status, error.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"there is no {path!r:.99} here" if error.status_code == 404 else f"{path} takes no {request.method}"
    told = RequestError(error.status_code, message)
    return JSONResponse(told.body(path), error.status_code, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # which nobody reads


async def _failed(request: Request, error: Exception) -> Response:
    told = as_request_error(error, {})
    return JSONResponse(told.body(request.url.path), told.status)
