"""The model in memory: loaded at the start, unloaded after some idle time, loaded again by the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ondevice.model import Model
from ondevice.progress import OnPrepare
from ondevice.server.requests import RequestError


class StoppedError(Exception):
    """The server stops while the model is being loaded."""


class ModelManager:
    """Loads, lends and unloads the model. All methods belong to one event loop; loading runs in another thread."""

    def __init__(self, load: Callable[[OnPrepare], Model], idle_s: float | None = None) -> None:
        """
        Args:
            load: makes the model, and reports its progress.
            idle_s: the model is unloaded after so many seconds without a user; None keeps it in memory.
        """
        self._load = load
        self._idle_s = idle_s
        self._model: Model | None = None
        self._loading: asyncio.Task[Model] | None = None
        self._users = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._progress = ("loading", 0.0)
        self._was_loaded = False
        self._closed = False

    @property
    def model(self) -> Model | None:
        """None while the model is not in memory."""
        return self._model

    async def start(self) -> None:
        """Load the model for the first time. Raises what `load` raises."""
        await self.acquire()
        self.release()

    async def acquire(self) -> Model:
        """Wait until the model is in memory and keep it there until `release`.

        Raises:
            RequestError: the server stops.
            Exception: what `load` raises.
        """
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._users += 1
        try:
            if self._model is None and not self._closed:
                await self._wait_until_loaded()
            if self._model is None:
                raise RequestError(503, "the server is stopping")
        except BaseException:
            self.release()
            raise
        return self._model

    def release(self) -> None:
        """Give up what `acquire` returned. Without users the idle time begins."""
        self._users -= 1
        if not self._users and self._model is not None and self._idle_s is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._unload)

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Model]:
        """`acquire` and `release` as a block. Raises what `acquire` and `check_loaded_once` raise."""
        self.check_loaded_once()
        model = await self.acquire()
        try:
            yield model
        finally:
            self.release()

    def check_loaded_once(self) -> None:
        """Refuse requests during the first load, which can take minutes. Requests wait for later loads.

        Raises:
            RequestError: the first load goes on; with llama.cpp's message, the current stage and its progress, 0 to 1.
        """
        if not self._was_loaded:
            stage, share = self._progress
            raise RequestError(503, "Loading model", retry_after=1, stage=stage, progress=round(share, 3))

    def close(self) -> None:
        """Unload the model, which cancels its generations, and end a load at its next progress report."""
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._unload()

    async def _wait_until_loaded(self) -> None:
        """All requests wait for the same load, which none of them can cancel."""
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load, self._report))
            self._loading.add_done_callback(self._keep_loaded)
        await asyncio.shield(self._loading)

    def _keep_loaded(self, loading: asyncio.Task[Model]) -> None:
        self._loading = None
        if loading.cancelled() or loading.exception() is not None:
            return
        self._model = loading.result()
        self._was_loaded = True
        if self._closed:
            self._unload()

    def _report(self, stage: str, share: float) -> None:
        self._progress = stage, share
        if self._closed:
            raise StoppedError

    def _unload(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()
