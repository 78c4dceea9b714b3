"""What all endpoints share: the model, the places, the sums, and the way from a request to its replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ondevice.bundle import Bundle
from ondevice.model import Model
from ondevice.server.delivery import as_request_error, deliver
from ondevice.server.fields import Fields, read_fields
from ondevice.server.metrics import Metrics
from ondevice.server.order import Order
from ondevice.server.places import Places
from ondevice.server.replies import Replies
from ondevice.server.residence import Residence
from ondevice.server.shape import Choice, Shape

MakeShape = Callable[[Model, list[Choice]], Shape]
Read = Callable[[Fields], tuple[Order, MakeShape]]
"""Of one API: what a request asks for, and how its replies are written."""


@dataclass(frozen=True)
class Service:
    """
    bundle : of the model, whose name clients see
    """

    bundle: Bundle
    residence: Residence
    places: Places
    metrics: Metrics

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    async def answer(self, request: Request, read: Read) -> Response:
        """Read a request, generate, and write the replies down.

        Raises:
            RequestError: it cannot be answered.
        """
        fields = await read_fields(request)
        stream = fields.flag("stream")
        order, make_shape = read(fields)
        try:
            replies = await Replies.begin(order, self.residence, self.places, self.metrics)
            choices = [Choice(index, stats, first) for index, (stats, first) in enumerate(replies.stats)]
            return await deliver(request, replies, choices, make_shape(replies.model, choices), stream)
        except Exception as error:
            raise as_request_error(error, fields) from error
