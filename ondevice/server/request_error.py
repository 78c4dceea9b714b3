"""Why a request is not answered, in the forms that clients know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ondevice.errors import ContextOverflowError, MissingDependencyError, OndeviceError, PromptError, UsageError

ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}

OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "unavailable_error",
}


class RequestError(Exception):
    """A request that gets an error.

    Attributes:
        status: of HTTP.
        param: the field that is at fault, where one is.
        retry_after: seconds after which it may be worth another try.
        facts: further fields of the error's body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        kind: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.facts = facts
        self._kind = kind

    @classmethod
    def of(cls, error: Exception, fields: Mapping[str, Any]) -> RequestError:
        """What a failed generation is to the client; a mistake in an option names the field that begins its message."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ContextOverflowError):
            return cls(
                400,
                str(error),
                kind="exceed_context_size_error",
                n_prompt_tokens=error.prompt_tokens,
                n_ctx=error.context_length,
            )
        if isinstance(error, PromptError | UsageError | MissingDependencyError):
            message = str(error)
            first = re.match(r"\w*", message)
            return cls(400, message, param=first[0] if first and first[0] in fields else None)
        if isinstance(error, OndeviceError):
            return cls(500, str(error))
        if isinstance(error, MemoryError):
            return cls(500, "there is not enough memory for this request: try a shorter prompt")
        return cls(500, f"the server failed ({type(error).__name__}); its log says more")

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def openai(self) -> dict[str, Any]:
        """The body as OpenAI's clients and llama.cpp's read it."""
        kind = self._kind or OPENAI_KINDS.get(self.status, "invalid_request_error")
        told = {"code": self.status, "message": self.message, "type": kind, "param": self.param}
        return {"error": {**told, **self.facts}}

    def anthropic(self) -> dict[str, Any]:
        """The body as Anthropic's clients read it."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        """In the form of the API that a path belongs to."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()
