"""The same on a Ray cluster: one model per machine, and who has a free place gets the next prompt.

A worker that is lost, with its machine or alone, is started again a few times, and what it had in hand goes to whoever
is free. Calls are repeated here and not by Ray, which would wait for that very worker.
"""

from __future__ import annotations

import argparse
import logging
import socket
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ondevice import __version__
from ondevice.bundle import MANIFEST, Bundle
from ondevice.errors import MissingDependencyError, UsageError, reason
from ondevice.machine import expanded
from ondevice.terminal.batch.answer import Answer
from ondevice.terminal.batch.remote_model import RemoteModel
from ondevice.terminal.loading import OPTIONS

if TYPE_CHECKING:
    from ondevice.terminal.batch.model_threads import News
    from ondevice.terminal.batch.request import Request

MOST_STARTS = 4
"""Of a machine's worker; after that the machine is left out."""

AHEAD = 2
"""Prompts that lie at a worker beside those that it answers: the next one is there when a place is free."""

POLL_S = 0.2
"""Seconds between looks at whether the batch was cancelled."""

PATIENCE_S = 10.0
"""With a cluster that does not answer."""

_log = logging.getLogger("ondevice")


@dataclass
class Worker:
    """
    node, host : the machine, for Ray and for people
    processors : that Ray counts there
    in_hand : what it was given, by Ray's reference to the answer; None while it loads the model
    """

    node: str
    host: str
    processors: float
    actor: Any = None
    starts: int = 0
    in_hand: dict[Any, Request | None] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        return None in self.in_hand.values()


class Cluster:
    def __init__(self, address: str, args: argparse.Namespace) -> None:
        """
        Args:
            address: as `ray.init` takes it.
            args: of the command.

        Raises:
            MissingDependencyError: ray is not installed.
            UsageError: there is no cluster at that address.
        """
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise MissingDependencyError("ray", "ray", what="--ray") from error
        self._ray: Any = ray  # not typed throughout
        self._only_at = NodeAffinitySchedulingStrategy
        self._sequences = args.max_sequences
        self._bundle = (_elsewhere(args.bundle), Bundle.open(args.bundle).content, __version__)
        self._options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
        self._stopped = False
        self._again: deque[Request] = deque()
        try:
            _knock(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"there is no Ray cluster at {address}: {reason(error)}") from error
        self._workers = [
            Worker(node["NodeID"], node["NodeManagerHostname"], node["Resources"]["CPU"])
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU")
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()  # the workers end with it

    def cancel(self) -> None:
        """Take no more answers."""
        self._stopped = True

    def answers(self, requests: Iterable[Request]) -> Generator[News, None, None]:
        """Answers in the order in which they come.

        Raises:
            OndeviceError: no worker is left.
        """
        left = iter(requests)
        for worker in list(self._workers):
            self._start(worker)
        while not self._stopped:
            for worker in self._workers:
                yield from self._feed(worker, left)
            if not self._is_at_work():
                request = next(left, None)
                if request is None:
                    return
                self._again.append(request)
            if not self._workers:
                raise UsageError("no machine of the cluster is left that can answer")
            owners = {reference: worker for worker in self._workers for reference in worker.in_hand}
            for reference in self._ray.wait(list(owners), timeout=POLL_S)[0] if owners else ():
                if (made := self._take(owners[reference], reference)) is not None:
                    yield made.new_tokens
                    yield made

    def _is_at_work(self) -> bool:
        """Whether there are prompts that were taken and have no answer."""
        return bool(self._again) or any(worker.in_hand and not worker.loads for worker in self._workers)

    def _start(self, worker: Worker) -> None:
        """Have a machine load the model, with all of its processors; leave it out where that failed too often."""
        if worker.starts == MOST_STARTS:
            self._leave_out(worker, f"it was lost {MOST_STARTS} times")
            return
        worker.starts += 1
        there = self._only_at(worker.node, soft=False)
        options = {"num_cpus": worker.processors, "max_concurrency": self._sequences, "scheduling_strategy": there}
        worker.actor = self._ray.remote(RemoteModel).options(**options).remote()
        worker.in_hand = {worker.actor.load.remote(*self._bundle, self._options): None}

    def _feed(self, worker: Worker, left: Iterator[Request]) -> Iterator[News]:
        """Give a worker as much as it may have; what is faulty nobody needs to be asked."""
        while not worker.loads and len(worker.in_hand) < self._sequences + AHEAD:
            request = self._again.popleft() if self._again else next(left, None)
            if request is None:
                return
            if request.fault is not None:
                yield Answer.refusing(request, request.fault)
            else:
                worker.in_hand[worker.actor.answer.remote(request)] = request

    def _take(self, worker: Worker, reference: Any) -> Answer | None:
        """What a worker has to say: an answer, or that it is ready, or nothing any more."""
        if reference not in worker.in_hand:
            return None  # it was lost a moment ago
        try:
            said: Answer | str | None = self._ray.get(reference)
        except (self._ray.exceptions.RayError, MemoryError) as error:
            self._lose(worker, reason(error))
            return None
        del worker.in_hand[reference]
        if isinstance(said, str):
            self._leave_out(worker, said)
            return None
        return said

    def _lose(self, worker: Worker, why: str) -> None:
        """Ask others what this one had in hand, and start it again."""
        _log.warning("a worker on %s is lost, its prompts are asked again: %s", worker.host, why)
        self._again.extend(request for request in worker.in_hand.values() if request is not None)
        worker.in_hand = {}
        self._ray.kill(worker.actor)
        if any(node["NodeID"] == worker.node and node["Alive"] for node in self._ray.nodes()):
            self._start(worker)
        else:
            self._leave_out(worker, "the machine is gone")

    def _leave_out(self, worker: Worker, why: str) -> None:
        _log.warning("%s is left out: %s", worker.host, why)
        self._workers = [each for each in self._workers if each is not worker]


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT, which Ray would try to reach for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S).close()


def _elsewhere(location: str) -> str:
    """A bundle as other machines find it: by the same path, or the same name under their model homes."""
    path = expanded(location)
    return str(path.resolve()) if (path / MANIFEST).is_file() else location
