"""Answering several requests at once: threads on one model, whose rows share forwards, or a Ray cluster.

On a cluster every machine has one worker with a model; free slots get the next prompt. A worker that is lost, alone or
with its machine, is started again a few times, and its prompts are retried on other workers. Ray's own retries are not
used: they would wait for the same worker.
"""

from __future__ import annotations

import argparse
import logging
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ondevice import __version__
from ondevice.bundle import MANIFEST, Bundle
from ondevice.cli.batch.answers import Answer, answer, refusal
from ondevice.cli.batch.requests import Request
from ondevice.cli.options import model_options
from ondevice.errors import MissingDependencyError, OndeviceError, UsageError, reason
from ondevice.machine import expanded

if TYPE_CHECKING:
    from ondevice.generation import Generation
    from ondevice.model import Model

BatchEvent = Answer | int
"""An answer, or a number of new tokens of answers that are not complete."""

MAX_STARTS = 4
"""Number of times that a machine's worker is started; after that the machine is no longer used."""

QUEUED = 2
"""Prompts sent to a worker beyond those that it runs, so that a free slot does not wait for the network."""

POLL_S = 0.1
"""Timeout of waits for answers, in seconds, after which a cancellation is noticed: on Windows, Ctrl-C is only seen
between two waits."""

_log = logging.getLogger("ondevice")


class ModelThreads:
    """Threads that run requests on one model in this process."""

    def __init__(self, model: Model, count: int) -> None:
        """`count` is the number of requests at the same time, the model's `max_sequences`."""
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._stopped = False

    def cancel(self) -> None:
        """Stop within one forward; requests without an answer get none. May be called from a signal handler."""
        self._stopped = True
        self._model.cancel()

    def answers(self, requests: Iterable[Request]) -> Generator[BatchEvent, None, None]:
        """Yield answers in the order in which they are completed, and numbers of new tokens in between.

        Raises:
            Exception: a failure that no request caused, such as a lack of memory; the other requests are stopped.
        """
        events: SimpleQueue[BatchEvent | Exception | None] = SimpleQueue()
        remaining = iter(requests)
        threads = [
            threading.Thread(target=self._work, args=(remaining, events), name="ondevice-batch", daemon=True)
            for _ in range(self._count)
        ]
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working:
                try:
                    event = events.get(timeout=POLL_S)
                except Empty:
                    continue
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    working -= 1
                else:
                    yield event
        finally:
            if working:
                self.cancel()
            for thread in threads:
                thread.join()

    def _work(self, remaining: Iterator[Request], events: SimpleQueue[BatchEvent | Exception | None]) -> None:
        """Answer requests until none is left; a thread's last event is None."""
        try:
            while True:
                with self._lock:
                    request = None if self._stopped else next(remaining, None)
                if request is None:
                    break
                made = answer(self._model, request, self._on_start, lambda step: events.put(len(step.token_ids)))
                if made is None or self._stopped:
                    break
                events.put(made)
        except Exception as error:
            events.put(error)
        events.put(None)

    def _on_start(self, generation: Generation) -> None:
        if self._stopped:  # `cancel` was called before the model had this generation to cancel
            generation.cancel()


class Cluster:
    """Workers on all machines of a Ray cluster; the same methods as `ModelThreads`."""

    def __init__(self, address: str, args: argparse.Namespace) -> None:
        """Connect to an address as `ray.init` takes it; `args` are the options of `ondevice batch`.

        Raises:
            MissingDependencyError: ray is not installed.
            UsageError: there is no cluster at that address.
        """
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise MissingDependencyError("ray", "ray", what="--ray") from error
        self._ray: Any = ray  # only partly typed
        self._node_affinity = NodeAffinitySchedulingStrategy
        self._sequences = args.max_sequences
        self._bundle = (_remote_location(args.bundle), Bundle.open(args.bundle).content, __version__)
        self._options = model_options(args)
        self._stopped = False
        self._retries: deque[Request] = deque()
        try:
            _check_reachable(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"there is no Ray cluster at {address}: {reason(error)}") from error
        nodes = self._ray.nodes()
        self._workers = [Worker(node) for node in nodes if node["Alive"] and node["Resources"].get("CPU")]

    def close(self) -> None:
        """Disconnect, which ends the workers."""
        self._ray.shutdown()

    def cancel(self) -> None:
        """Stop waiting for answers."""
        self._stopped = True

    def answers(self, requests: Iterable[Request]) -> Generator[BatchEvent, None, None]:
        """Yield answers in the order in which they are completed, each after its number of tokens.

        Raises:
            OndeviceError: no worker is left.
        """
        remaining = iter(requests)
        for worker in list(self._workers):
            self._start(worker)
        while not self._stopped:
            for worker in self._workers:
                yield from self._submit(worker, remaining)
            if not self._retries and not any(worker.calls and not worker.is_loading for worker in self._workers):
                request = next(remaining, None)
                if request is None:
                    return  # and all that were taken have an answer
                self._retries.append(request)
            if not self._workers:
                raise UsageError("no machine of the cluster is left that can answer")
            owners = {reference: worker for worker in self._workers for reference in worker.calls}
            for reference in self._ray.wait(list(owners), timeout=POLL_S)[0] if owners else ():
                if (made := self._receive(owners[reference], reference)) is not None:
                    yield made.new_tokens
                    yield made

    def _start(self, worker: Worker) -> None:
        """Start the machine's process, on all of its processors, and let it load the model."""
        if worker.starts == MAX_STARTS:
            self._remove(worker, f"its worker was lost {MAX_STARTS} times")
            return
        worker.starts += 1
        strategy = self._node_affinity(worker.node["NodeID"], soft=False)
        processors = worker.node["Resources"]["CPU"]
        options = {"num_cpus": processors, "max_concurrency": self._sequences, "scheduling_strategy": strategy}
        worker.actor = self._ray.remote(RemoteModel).options(**options).remote()
        worker.calls = {worker.actor.load.remote(*self._bundle, self._options): None}

    def _submit(self, worker: Worker, remaining: Iterator[Request]) -> Iterator[BatchEvent]:
        """Send requests to a worker until it has enough; requests with a fault are answered here."""
        while not worker.is_loading and len(worker.calls) < self._sequences + QUEUED:
            request = self._retries.popleft() if self._retries else next(remaining, None)
            if request is None:
                return
            if request.fault is not None:
                yield refusal(request, request.fault)
            else:
                worker.calls[worker.actor.answer.remote(request)] = request

    def _receive(self, worker: Worker, reference: Any) -> Answer | None:
        """The result of a call: an answer, or None where the model was loaded or the worker failed."""
        if reference not in worker.calls:
            return None  # the worker was lost since the wait
        try:
            result: Answer | str | None = self._ray.get(reference)
        except (self._ray.exceptions.RayError, MemoryError) as error:
            self._restart(worker, reason(error))
            return None
        del worker.calls[reference]
        if isinstance(result, str):
            self._remove(worker, result)
            return None
        return result

    def _restart(self, worker: Worker, why: str) -> None:
        """Retry the requests of a lost worker elsewhere, and start it again if its machine is alive."""
        _log.warning("lost the worker on %s, its prompts are retried: %s", worker.node["NodeManagerHostname"], why)
        self._retries.extend(request for request in worker.calls.values() if request is not None)
        worker.calls = {}
        self._ray.kill(worker.actor)
        if any(node["NodeID"] == worker.node["NodeID"] and node["Alive"] for node in self._ray.nodes()):
            self._start(worker)
        else:
            self._remove(worker, "the machine is gone")

    def _remove(self, worker: Worker, why: str) -> None:
        _log.warning("%s is not used: %s", worker.node["NodeManagerHostname"], why)
        self._workers = [each for each in self._workers if each is not worker]


@dataclass
class Worker:
    """A machine of the cluster and the process that answers there.

    node : the machine, as `ray.nodes` describes it
    actor : Ray's handle of a `RemoteModel`
    starts : number of times that the process was started
    calls : open calls by Ray's reference to the result: the request, or None for loading the model
    """

    node: dict[str, Any]
    actor: Any = None
    starts: int = 0
    calls: dict[Any, Request | None] = field(default_factory=dict)

    @property
    def is_loading(self) -> bool:
        return None in self.calls.values()


class RemoteModel:
    """A Ray actor, a process on a machine of the cluster: `load` once, then `answer` from several threads at once."""

    def __init__(self) -> None:
        self._model: Model

    def load(self, location: str, content: str, version: str, options: dict[str, Any]) -> str | None:
        """Load the model, with keywords of `ondevice.load`, if this machine has the same version and bundle.

        `content` and `version` are those where the batch was started; every file here is compared with the hash
        `content`. Returns why this machine cannot be used, or None.
        """
        import ondevice

        if version != __version__:
            return f"it has ondevice {__version__} and not {version}: install the same"
        try:
            found = Bundle.open(location, verify_hashes=True)
            if found.content != content:
                return f"its {location} is another bundle: copy it there again"
            self._model = ondevice.load(found.path, **options)
        except OndeviceError as error:  # returned as text, because some errors cannot be sent to another process
            return str(error)
        return None

    def answer(self, request: Request) -> Answer | None:
        return answer(self._model, request)


def _check_reachable(address: str) -> None:
    """Connect to HOST:PORT, or raise OSError, because Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()


def _remote_location(location: str) -> str:
    """A bundle as other machines find it: the same absolute path, or the same name under their $ONDEVICE_HOME."""
    path = expanded(location)
    return str(path.resolve()) if (path / MANIFEST).is_file() else location
