"""Several models in one server: names, aliases, loading on demand, and unloading for another's room."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from ondevice.bundle import Bundle
from ondevice.errors import UsageError
from ondevice.model import CACHE_BYTES
from ondevice.server.model_manager import ModelManager, Models, ServedModel
from ondevice.server.requests import RequestError
from ondevice.server.running import Server, Setup
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.server.served import running, wait_until


@pytest.fixture
def three(tmp_path, gate):
    """The sources of three toy models, and the names of those that were loaded, in order."""
    loaded = []

    def source(name):
        bundle = Bundle.open(write_bundle(tmp_path / name, name=name))

        def load(report):
            loaded.append(name)
            return model_over(ToyEngine(400, chunk=16, before=gate), bundle.path, max_sequences=2)

        return ServedModel(bundle, load)

    return [source(name) for name in ("a", "b", "c")], loaded


def test_a_request_that_arrives_at_the_very_end_of_a_load_gets_the_model(tmp_path):
    bundle = Bundle.open(write_bundle(tmp_path / "a", name="a"))
    source = ServedModel(bundle, lambda report: model_over(ToyEngine(400), bundle.path))

    async def acquire_at_the_end():
        manager = ModelManager(source)
        first = asyncio.create_task(manager.acquire())
        while manager._loading is None:
            await asyncio.sleep(0)
        loading = manager._loading
        while not loading.done():
            await asyncio.sleep(0)
        assert await manager.acquire() is await first  # nothing else ran since the load has ended
        manager.close()

    asyncio.run(acquire_at_the_end())


@pytest.fixture
def serve_three(three, gate):
    @contextmanager
    def start(**setup):
        with running(Server(three[0], Setup(max_sequences=2, **setup))) as served:
            try:
                yield served
            finally:
                gate.open()

    return start


def ask(served, **fields):
    return served.post("/v1/completions", prompt="abc", max_tokens=3, **fields)


def in_memory(served):
    return [card["id"] for card in served.get("/v1/models").body["data"] if card["status"]["value"] == "loaded"]


def room_for(count):
    """Bytes for so many of the toy models, and not for one more."""
    return int((count + 0.5) * CACHE_BYTES)


def test_the_first_is_loaded_at_the_start_and_the_others_on_demand(serve_three, three):
    with serve_three() as served:
        assert three[1] == ["a"]
        assert [card["id"] for card in served.get("/v1/models").body["data"]] == ["a", "b", "c"]
        assert ask(served, model="c").body["model"] == "c"
        assert ask(served).body["model"] == "a"
        assert three[1] == ["a", "c"]
        assert in_memory(served) == ["a", "c"]
        assert served.get("/props?model=b").body["model_alias"] == "b"


def test_a_model_that_is_not_in_memory_is_not_loaded_to_be_unloaded(serve_three, three):
    with serve_three(memory=room_for(1)) as served:
        for path, said in (("generate", {"response": ""}), ("chat", {"message": {"role": "assistant", "content": ""}})):
            answer = served.post(f"/api/{path}", model="b", keep_alive=0)
            assert answer.status == 200
            assert answer.body.items() >= {"model": "b", "done": True, "done_reason": "unload", **said}.items()
            wrong = served.post(f"/api/{path}", model="b", keep_alive=0, made_up=1)
            assert wrong.status == 400
        assert three[1] == in_memory(served) == ["a"]


def test_an_unknown_name_is_told_the_known_ones(serve_three):
    with serve_three(aliases={"gpt-4o": ""}) as served:
        for path, fields in (("/v1/completions", {"prompt": "abc"}), ("/tokenize", {"content": "abc"})):
            answer = served.post(path, **fields, model="gpt-4")
            assert (answer.status, answer.body["error"]["param"]) == (404, "model")
            message = answer.body["error"]["message"]
            assert message == "no model 'gpt-4' here: did you mean gpt-4o? There are a, b, c, gpt-4o"
        assert served.get("/v1/models/x").status == 404
        assert served.get("/props?model=x").status == 404


def test_aliases(serve_three):
    with serve_three(aliases={"gpt-4o": "", "small": "b"}) as served:
        assert ask(served, model="gpt-4o").body["model"] == "a"
        assert ask(served, model="small").body["model"] == "b"
        assert served.get("/v1/models/small").body["id"] == "b"


def served_as(tmp_path, places):
    """Models of bundles by their directories and names."""
    bundles = [Bundle.open(write_bundle(tmp_path / place, name=name)) for place, name in places.items()]
    return Models([ServedModel(bundle, never_loaded) for bundle in bundles], aliases={"x": "small"})


def never_loaded(report):
    raise AssertionError


def test_a_directory_s_name_stands_for_its_bundle(tmp_path):
    models = served_as(tmp_path, {"small": "SmolLM2", "e2b": "gemma-4-E2B-it", "1/twice": "c", "2/twice": "d"})
    assert list(models.by_name) == ["SmolLM2", "gemma-4-E2B-it", "c", "d"]
    assert models.find("small") is models.find("SmolLM2") is models.find("small:latest") is models.find("x")
    assert models.find("e2b").name == "gemma-4-E2B-it"
    with pytest.raises(RequestError, match="no model 'twice' here"):
        models.find("twice")


def test_a_model_s_name_comes_before_a_directory_s(tmp_path):
    models = served_as(tmp_path, {"a": "small", "small": "b"})
    assert models.find("small").directory == "a"


def test_bundles_of_one_name_go_by_their_directories(tmp_path):
    models = served_as(tmp_path, {"small": "SmolLM2", "smollm2": "SmolLM2", "e2b": "gemma-4-E2B-it"})
    assert list(models.by_name) == ["small", "smollm2", "gemma-4-E2B-it"]
    with pytest.raises(RequestError, match="There are small, smollm2, gemma-4-E2B-it"):
        models.find("SmolLM2")


def test_responses_name_a_model_as_requests_do(tmp_path):
    """Two bundles have one name: the page asks for what `/props` says, and clients compare what a response says."""

    def source(place):
        path = write_bundle(tmp_path / place, name="SmolLM2")
        return ServedModel(Bundle.open(path), lambda report: model_over(ToyEngine(400), path))

    with running(Server([source("small"), source("smollm2")], Setup())) as served:
        assert served.get("/props?model=smollm2").body["model_alias"] == "smollm2"
        assert ask(served, model="smollm2").body["model"] == "smollm2"
        raw = {"model": "smollm2", "prompt": "abc", "raw": True, "options": {"num_predict": 3}}
        assert served.post("/api/generate", **raw, stream=False).body["model"] == "smollm2"


def test_the_least_recently_used_makes_room(serve_three, three):
    with serve_three(memory=room_for(2)) as served:
        ask(served, model="b")
        ask(served, model="a")
        assert in_memory(served) == ["a", "b"]
        ask(served, model="c")
        assert in_memory(served) == ["a", "c"]
        ask(served, model="b")
        assert in_memory(served) == ["b", "c"]
        assert three[1] == ["a", "b", "c", "b"]


def test_a_model_in_use_is_waited_for(serve_three, three, gate):
    """The request for a model without room waits until the replies before it have ended, and later ones after it."""
    with serve_three(memory=room_for(1)) as served:
        gate.close()
        answers = {}

        def begin(name, count):
            def run():
                answers[name] = ask(served, model=name[0])

            threading.Thread(target=run, name=name).start()
            wait_until(lambda: served.gauge("requests_processing") + served.gauge("requests_deferred") == count)

        begin("a1", 1)
        wait_until(lambda: gate.arrived == 1)
        begin("b1", 2)
        begin("a2", 3)
        assert three[1] == ["a"]
        gate.open()
        wait_until(lambda: len(answers) == 3)
        assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(("a1", "b1", "a2"), 200)
        assert three[1] == ["a", "b", "a"]


def test_a_client_that_waits_for_room_can_leave(serve_three, three, gate):
    with serve_three(memory=room_for(1)) as served:
        gate.close()
        waiting = threading.Thread(target=lambda: ask(served, model="a"))
        waiting.start()
        wait_until(lambda: gate.arrived == 1)
        connection = served.connect()
        connection.request("POST", "/v1/completions", b'{"prompt": "abc", "model": "b", "stream": true}')
        wait_until(lambda: served.gauge("requests_deferred") == 1)
        connection.close()
        wait_until(lambda: served.gauge("requests_deferred") == 0)
        gate.open()
        waiting.join()
        assert ask(served, model="c").status == 200
        assert three[1] == ["a", "c"]


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(three):
    def fail(report):
        raise UsageError("no kernels")

    sources = [three[0][0], ServedModel(three[0][1].bundle, fail)]
    with running(Server(sources, Setup(memory=room_for(2)))) as served:
        for _ in range(2):
            answer = ask(served, model="b")
            assert (answer.status, answer.body["error"]["message"]) == (400, "no kernels")
        assert ask(served, model="a").status == 200


def test_a_load_that_the_server_s_stop_ends_says_so(three):
    begun, bundle = threading.Event(), three[0][1].bundle

    def load(report):
        begun.set()
        while True:  # until the report raises
            report("packing", 0.5)

    async def stop_while_loading():
        manager = ModelManager(ServedModel(bundle, load))
        waiting = asyncio.create_task(manager.acquire())
        await asyncio.to_thread(begun.wait)
        manager.close()
        with pytest.raises(RequestError, match="the server is stopping") as refused:
            await waiting
        assert refused.value.status == 503

    asyncio.run(stop_while_loading())


def test_models_that_cannot_be_served(three):
    sources, _ = three
    with pytest.raises(UsageError, match="two bundles have the name 'a'"):
        Models([sources[0], sources[0]])
    with pytest.raises(UsageError, match="more than --memory"):
        Models(sources, memory=1000)
    with pytest.raises(UsageError, match="the alias 'x' stands for 'd', which is not served"):
        Models(sources, aliases={"x": "d"})
