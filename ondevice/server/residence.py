"""The model in memory: loaded at the start, unloaded when nobody needs it for a while, loaded again on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ondevice.model import Model
from ondevice.progress import OnPrepare
from ondevice.server.request_error import RequestError


class StoppedError(Exception):
    """The server ends while the model is being loaded."""


class Residence:
    """Used by one event loop; the model is loaded in another thread."""

    def __init__(self, load: Callable[[OnPrepare], Model], idle_s: float | None = None) -> None:
        """
        Args:
            load: makes the model, and tells how far it is.
            idle_s: after so many seconds without a request, the model's memory is given back.
        """
        self._load = load
        self._idle_s = idle_s
        self._model: Model | None = None
        self._loading: asyncio.Task[Model] | None = None
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._progress = ("loading", 0.0)
        self._closed = False
        self.was_loaded = False

    @property
    def model(self) -> Model | None:
        """None while it is not in memory."""
        return self._model

    async def start(self) -> None:
        """Load for the first time; raises what the loading does."""
        await self.take()
        self.give_back()

    async def take(self) -> Model:
        """The model, in memory until `give_back`.

        Raises:
            RequestError: the server ends.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._users += 1
        try:
            if self._model is None and not self._closed:
                await self._loaded()
            if self._model is None:
                raise RequestError(503, "the server is stopping")
        except BaseException:
            self.give_back()
            raise
        return self._model

    def give_back(self) -> None:
        """One user less."""
        self._users -= 1
        if not self._users and self._model is not None and self._idle_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._unload)

    @asynccontextmanager
    async def model_at_hand(self) -> AsyncIterator[Model]:
        """The model, in memory within the block; raises what `take` and `check_loaded_once` do."""
        self.check_loaded_once()
        model = await self.take()
        try:
            yield model
        finally:
            self.give_back()

    def check_loaded_once(self) -> None:
        """Raises a RequestError while the model is being loaded for the first time."""
        if not self.was_loaded:
            what, share = self._progress
            raise RequestError(503, "Loading model", retry_after=1, stage=what, progress=round(share, 3))

    def close(self) -> None:
        """Cancel what is generated, and give the memory back; a loading ends soon."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._unload()

    async def _loaded(self) -> None:
        """Wait for the one loading that goes on, which no single request can cancel."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_now())
            self._loading.add_done_callback(self._took)
        await asyncio.shield(self._loading)

    async def _load_now(self) -> Model:
        return await asyncio.to_thread(self._load, self._tell)

    def _took(self, loading: asyncio.Task[Model]) -> None:
        self._loading = None
        if loading.cancelled() or loading.exception() is not None:
            return
        self._model = loading.result()
        self.was_loaded = True
        if self._closed:
            self._unload()

    def _tell(self, what: str, share: float) -> None:
        self._progress = what, share
        if self._closed:
            raise StoppedError

    def _unload(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()
