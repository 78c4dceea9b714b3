"""The JSON object that a request is, asked for field by field."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from ondevice.errors import reason
from ondevice.server.request_error import RequestError

MOST_BYTES = 1 << 24
"""Of a request. A context of 262,144 tokens has about 1.3 million characters."""


class Fields(Mapping[str, Any]):
    """Values by name; null is as if it were not there. What nobody asks for is ignored, as clients expect.

    The readers raise a `RequestError` that names the field where a value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """
        Args:
            values: of the object.
            path: of the object in the request, as errors begin the names of its fields: empty or with a dot at its end.
        """
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(name, "a number")
        return value

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        # some clients write 64.0: JSON knows one kind of number
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if (
            isinstance(whole, bool)
            or not isinstance(whole, int)
            or whole < least
            or (most is not None and whole > most)
        ):
            raise self.wrong(name, f"a whole number from {least} {'on' if most is None else f'to {most}'}")
        return whole

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def inner(self, name: str) -> Fields:
        """An object in this one; empty where it is not there."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self._path}{name}.")

    def array(self, name: str) -> Sequence[Any]:
        value = self.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        found = self.array(name)
        if not all(isinstance(each, Mapping) for each in found):
            raise self.wrong(name, "a list of objects")
        return [Fields(each, f"{self._path}{name}[{number}].") for number, each in enumerate(found)]

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of them."""
        value = self.get(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, "a string or a list of strings")
        return tuple(found)

    def needed(self, name: str) -> Any:
        """What a request cannot do without."""
        if name not in self:
            raise RequestError(400, f"{self._path}{name} is missing", param=self._path + name)
        return self[name]

    def wrong(self, name: str, wanted: str) -> RequestError:
        return RequestError(
            400, f"{self._path}{name} must be {wanted}, not {self[name]!r:.99}", param=self._path + name
        )

    def missing_feature(self, name: str, message: str) -> RequestError:
        """A field that asks for something that is not there."""
        return RequestError(400, f"{self._path}{name}: {message}", param=self._path + name)


async def read_fields(request: Request) -> Fields:
    """The body of a request.

    Raises:
        RequestError: it is too large, or no JSON object.
    """
    too_large = RequestError(413, f"the request has more than {MOST_BYTES} bytes")
    if request.headers.get("content-length", "").isdecimal() and int(request.headers["content-length"]) > MOST_BYTES:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise too_large
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not valid JSON: {reason(error)}") from error
    if not isinstance(values, dict):
        raise RequestError(400, f"the request must be a JSON object, not {type(values).__name__}")
    return Fields(values)
