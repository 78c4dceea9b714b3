"""Random requests to a server in a process of its own: `tests.fuzz.requests`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from starlette.routing import Route

from ondevice.bundle import Bundle
from ondevice.server.app import make_app
from ondevice.server.guard import Rules
from ondevice.server.metrics import Metrics
from ondevice.server.model_manager import Models, ServedModel
from ondevice.server.page import FILES
from ondevice.server.replies import AdmissionQueue
from tests.fixtures.chat_bundle import write_chat_bundle
from tests.fixtures.model_made import load_toy
from tests.fuzz.requests import PATHS, SERVED, VALID, Requests
from tests.server.alone import Alone, served_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def alone(reference_bundle: Path, tmp_path_factory: pytest.TempPathFactory):
    room = tmp_path_factory.mktemp("fuzzed")
    with served_alone(write_chat_bundle(reference_bundle, room / "chat", do_sample=True), room, *SERVED) as served:
        yield served


def faults_of(served: Alone, seeds: range) -> list[str]:
    """The faults of requests with these seeds, as far as the tenth: after it there may be no server any more."""
    requests, found = Requests(served), []
    for seed in seeds:
        _, said, faults = requests.try_one(random.Random(seed))
        found += [f"seed {seed}: {said:.300}\n  {fault}" for fault in faults]
        if len(found) > 10:
            break
    return found


def check(served: Alone, seeds: range, grown: int) -> None:
    """Send the requests of these seeds after 200 others, and check that the server answers and has not grown."""
    faults = faults_of(served, range(200))
    before = served.memory("VmRSS")
    faults += faults_of(served, seeds)
    assert not faults, "\n".join(faults)
    served.wait_until_idle()
    assert served.post("/v1/completions", prompt="abc", max_tokens=2).status == 200
    assert served.memory("VmRSS") - before < grown


def test_random_requests(alone: Alone) -> None:
    check(alone, range(200, 400), 64 * MEGABYTE)


@pytest.mark.slow
def test_10000_random_requests(alone: Alone) -> None:
    check(alone, range(1000, 11_000), 128 * MEGABYTE)


def test_every_path_gets_random_requests(reference_bundle: Path) -> None:
    models = Models([ServedModel(Bundle.open(reference_bundle), lambda report: load_toy(reference_bundle))])
    guard = make_app(models, AdmissionQueue(1, 1), Metrics(), Rules())
    routes = [route for route in vars(guard)["_app"].routes if isinstance(route, Route)]
    posts = [route for route in routes if route.methods == {"POST"}]
    assert all(any(route.path_regex.match(path) for path, _ in VALID) for route in posts)
    others = {route.path.partition("{")[0] for route in routes if route not in posts} - set(FILES)
    assert all(any(path.startswith(each) for path in PATHS) for each in others)
