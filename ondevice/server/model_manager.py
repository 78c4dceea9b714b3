"""The models of a server: found by name, loaded by the first request for one, unloaded when idle or for another's room.

`Models` is the list of them, `ModelManager` loads, lends and unloads one, `Memory` limits what they take together. All
methods belong to one event loop; loading runs in other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import NamedTuple

from ondevice.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle
from ondevice.errors import UsageError, near, shown
from ondevice.model import CACHE_BYTES, MEDIA_CACHE_BYTES, Model
from ondevice.progress import OnPrepare
from ondevice.server.requests import RequestError
from ondevice.text.messages import BUDGET, EFFORT, THINKING, THINKING_TOO

THINKS = re.compile(rf"{THINKING}|{EFFORT}|{BUDGET}|\bif {THINKING_TOO}\b")
"""A template's variable for thoughts."""

LATEST = ":latest"
"""Ollama's clients write it after the name of a model without a tag."""


class StoppedError(Exception):
    """The server stops while a model is being loaded."""


class ServedModel(NamedTuple):
    """A model to serve.

    bundle : names and describes the model while it is not in memory
    load : makes the bundle's model, and reports its progress; called in another thread
    """

    bundle: Bundle
    load: Callable[[OnPrepare], Model]


class Models:
    """The models of a server by name. The first one answers requests that name none.

    A model's name is that of its bundle, or of the bundle's directory where two bundles have one name. A directory's
    name stands for its bundle too, unless it is another model's name.
    """

    def __init__(
        self,
        sources: Sequence[ServedModel],
        *,
        idle_s: float | None = None,
        memory: int | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            sources: at least one.
            idle_s: a model is unloaded after so many seconds without a user; None keeps it in memory.
            memory: bytes that all models in memory may take; None for no limit.
            aliases: further names of models, such as `gpt-4o`, and the names of these models; empty for the first one.

        Raises:
            UsageError: two models of one name, an alias of none, or a model that takes more than `memory` alone.
        """
        room = Memory(memory)
        managers = [ModelManager(source, room, idle_s, is_first=not at) for at, source in enumerate(sources)]
        names = Counter(manager.name for manager in managers)
        self.by_name: dict[str, ModelManager] = {}
        for manager in managers:
            if names[manager.name] > 1:
                manager.name = manager.directory
            if manager.name in self.by_name:
                raise UsageError(f"two bundles have the name {manager.name!r}: serve one of them")
            if memory is not None and manager.size > memory:
                wanted = f"{manager.name} may take {manager.size / 1e9:.2f} GB with its cache"
                raise UsageError(f"{wanted}, which is more than --memory: raise it, or leave this bundle out")
            self.by_name[manager.name] = manager
        self.first = managers[0]
        directories = Counter(manager.directory for manager in managers)
        self._aliases: dict[str, ModelManager] = {
            name: manager
            for manager in managers
            if directories[name := manager.directory] == 1 and name not in self.by_name
        }
        known = {**self._aliases, **self.by_name}
        for alias, name in (aliases or {}).items():
            if name and name not in known:
                raise UsageError(
                    f"the alias {alias!r} stands for {name!r}, which is not served: there are {', '.join(known)}"
                )
            self._aliases[alias] = known[name] if name else self.first

    def __iter__(self) -> Iterator[ModelManager]:
        return iter(self.by_name.values())

    def find(self, name: str | None) -> ModelManager:
        """The model of a name or an alias; the first one for None.

        Raises:
            RequestError: there is no such model.
        """
        if name is None:
            return self.first
        names = (name, name[: -len(LATEST)]) if name.endswith(LATEST) else (name,)
        found = next((one for each in names if (one := self.by_name.get(each) or self._aliases.get(each))), None)
        if found is None:
            known = [*self.by_name, *self._aliases]
            meant = near(name, known) or "."
            raise RequestError(404, f"no model {shown(name)} here{meant} There are {', '.join(known)}", param="model")
        return found

    async def start(self) -> None:
        """Load the first model. Raises what its `load` raises."""
        async with self.first.lend():
            pass

    def close(self) -> None:
        """Unload all models, which cancels their generations, and end loads at their next progress report."""
        for manager in self:
            manager.close()


class Memory:
    """Room for models in memory. Where a model needs more than is left, those that were not used for longest go first.

    `turn` is held from the arrival of a request until it has its model, or begins to load it: requests for models in
    memory wait after one for which there is no room yet. So it gets its turn when the replies before it have ended.
    """

    def __init__(self, limit: int | None) -> None:
        self.turn = asyncio.Lock()
        self._limit = limit
        self._held: dict[ModelManager, None] = {}
        """Models in memory, and those that are being loaded, by their last use."""
        self._changed = asyncio.Event()

    async def take(self, manager: ModelManager) -> None:
        """Wait until there is room for a model, and take it. The models in it that nobody uses are unloaded."""
        while self._limit is not None and sum(each.size for each in self._held) + manager.size > self._limit:
            idle = next((each for each in self._held if each.is_idle), None)
            if idle is not None:
                idle.unload()
                continue
            self._changed.clear()
            await self._changed.wait()
            manager.check_open()
        self._held[manager] = None

    def give_back(self, manager: ModelManager) -> None:
        """A model is not in memory any more."""
        self._held.pop(manager, None)
        self._changed.set()

    def used(self, manager: ModelManager) -> None:
        """A model has lost a user."""
        if manager in self._held:
            self._held[manager] = self._held.pop(manager)
        self._changed.set()


class ModelManager:
    """Loads, lends and unloads one model."""

    def __init__(
        self, source: ServedModel, memory: Memory | None = None, idle_s: float | None = None, *, is_first: bool = False
    ) -> None:
        """
        Args:
            source: bundle, and what makes its model.
            memory: room of all models; None for no limit.
            idle_s: the model is unloaded after so many seconds without a user; None keeps it in memory.
            is_first: whether it is loaded when the server starts: requests are refused until it is.
        """
        self.bundle = source.bundle
        self.name = source.bundle.manifest.name
        self.directory = source.bundle.path.absolute().name
        self._load = source.load
        self._memory = memory or Memory(None)
        self._usual_idle_s = self._idle_s = idle_s
        self._model: Model | None = None
        self._loading: asyncio.Task[None] | None = None
        self._users = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._progress = ("loading", 0.0)
        self._is_starting = is_first
        self._closed = False

    @property
    def model(self) -> Model | None:
        """None while the model is not in memory."""
        return self._model

    @property
    def size(self) -> int:
        """Bytes that the model may take: its weights, and the caches of finished conversations and of pictures."""
        manifest = self.bundle.manifest
        return manifest.weight_bytes + CACHE_BYTES + (MEDIA_CACHE_BYTES if manifest.reads_media else 0)

    @cached_property
    def capabilities(self) -> tuple[str, ...]:
        """The model's abilities, in Ollama's words. Tools and thoughts are what its chat template has a place for."""
        manifest, path = self.bundle.manifest, self.bundle.file(CHAT_TEMPLATE)
        template = "" if path is None else path.read_text("utf-8", "replace")
        can = {
            "completion": self.bundle.file(TOKENIZER) is not None,
            "chat": path is not None,
            "tools": "tools" in template,
            "thinking": THINKS.search(template) is not None,
            "vision": manifest.vision is not None,
            "audio": manifest.audio is not None,
        }
        return tuple(name for name, is_there in can.items() if is_there)

    @property
    def loading(self) -> tuple[str, float] | None:
        """The stage of a load and its progress, 0 to 1; None while there is none."""
        return None if self._loading is None else self._progress

    @property
    def is_idle(self) -> bool:
        """Whether the model is in memory, and nobody uses it."""
        return self._model is not None and not self._users

    @property
    def idle_left_s(self) -> float | None:
        """Seconds until the model is unloaded; None if it stays, or is in use."""
        timer = self._idle_timer
        return None if timer is None else max(0.0, timer.when() - asyncio.get_running_loop().time())

    def keep(self, idle_s: float | None) -> None:
        """Unload the model after another idle time, as a user of it may wish. The next load has the usual one again."""
        self._idle_s = idle_s

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Model]:
        """`acquire` and `release` as a block."""
        model = await self.acquire()
        try:
            yield model
        finally:
            self.release()

    async def acquire(self) -> Model:
        """Wait until the model is in memory, and keep it there until `release`.

        Raises:
            RequestError: the server stops.
            Exception: what `load` raises.
        """
        async with self._memory.turn:
            self._users += 1
            try:
                if self._idle_timer is not None:
                    self._idle_timer.cancel()
                    self._idle_timer = None
                self.check_open()
                if self._model is None and self._loading is None:
                    await self._memory.take(self)
                    self._begin_to_load()
            except BaseException:
                self.release()
                raise
        try:
            if self._loading is not None:
                with contextlib.suppress(StoppedError):  # said by `check_open`
                    await asyncio.shield(self._loading)  # all requests wait for the same load, which none can cancel
            self.check_open()
            assert self._model is not None
        except BaseException:
            self.release()
            raise
        return self._model

    def release(self) -> None:
        """Give up what `acquire` returned. Without users the idle time begins."""
        self._users -= 1
        if not self._users:
            self._memory.used(self)
            if self._model is not None and self._idle_s is not None:
                self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self.unload)

    def check_open(self) -> None:
        """
        Raises:
            RequestError: the server stops.
        """
        if self._closed:
            raise RequestError(503, "the server is stopping")

    def check_started(self) -> None:
        """Refuse requests while the server starts, which can take minutes. Requests wait for later loads.

        Raises:
            RequestError: with llama.cpp's message, the current stage and its progress, 0 to 1.
        """
        if self._is_starting:
            stage, share = self._progress
            raise RequestError(503, "Loading model", retry_after=1, stage=stage, progress=round(share, 3))

    def close(self) -> None:
        """Unload the model, which cancels its generations, and end a load at its next progress report."""
        self._closed = True
        self.unload()
        self._memory.give_back(self)  # wakes those that wait for room

    def unload(self) -> None:
        """Take the model out of memory."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        model, self._model = self._model, None
        self._idle_s = self._usual_idle_s
        if model is not None:
            model.close()
            self._memory.give_back(self)

    def _begin_to_load(self) -> None:
        self._progress = ("loading", 0.0)
        self._loading = asyncio.create_task(self._load_model())
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # those who wait raise it

    async def _load_model(self) -> None:
        """Load the model. When the task is done, so is all that follows a load: a request may arrive at any time."""
        try:
            model = await asyncio.to_thread(self._load, self._report)
        except BaseException:
            self._memory.give_back(self)
            raise
        finally:
            self._loading = None
        self._model = model
        self._is_starting = False
        if self._closed:
            self.unload()
        elif not self._users:
            self._users = 1  # they left during the load
            self.release()

    def _report(self, stage: str, share: float) -> None:
        self._progress = stage, share
        if self._closed:
            raise StoppedError
