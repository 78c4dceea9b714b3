"""Admission queue, clients that disconnect, failing engines, and a server that stops."""

import gc
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ondevice import machine
from ondevice.server.replies import WORKERS
from ondevice.server.requests import RequestFields
from tests.server.served import Answer, wait_until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
REQUESTS = 200
PROMPTS = ["def f(", "class Tree:\n", "import os\n", "for i in range(", 'print("', "x = [" * 40, "# a comment\n" * 30]
MEGABYTE = 1 << 20


def in_background(served, answers, **fields):
    thread = threading.Thread(target=lambda: answers.append(served.post(TEXT, **fields)))
    thread.start()
    return thread


def test_requests_wait_in_a_bounded_queue(serve_toy, gate):
    with serve_toy(max_sequences=2, max_waiting=1) as served:
        gate.close()
        answers: list[Answer] = []
        threads = [in_background(served, answers, prompt="abc", max_tokens=3) for _ in range(3)]
        wait_until(lambda: served.gauge("requests_processing") == 2 and served.gauge("requests_deferred") == 1)
        refused = served.post(TEXT, prompt="abc", max_tokens=3)
        assert refused.status == 503
        assert refused.body["error"]["type"] == "unavailable_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        gate.open()
        for thread in threads:
            thread.join()
        assert [answer.status for answer in answers] == [200] * 3
        assert served.post(TEXT, prompt="abc", max_tokens=3).status == 200
        served.wait_until_idle()


def test_disconnecting_from_a_stream_cancels_the_reply(serve_toy, gate):
    with serve_toy() as served:
        gate.close(behind=20)
        with served.stream(TEXT, prompt="abc", drafter="none") as lines:
            next(lines)
            assert served.gauge("requests_processing") == 1
        served.let_it_notice()
        gate.open()
        served.wait_until_idle()
        assert served.gauge("tokens_predicted_total") <= 22


def test_disconnecting_before_a_whole_reply_cancels_it(serve_toy, gate):
    with serve_toy() as served:
        gate.close()
        connection = served.connect()
        connection.request("POST", TEXT, b'{"prompt": "abc"}')
        wait_until(lambda: gate.arrived == 1)
        connection.sock.close()
        connection.close()
        served.let_it_notice()
        gate.open()
        served.wait_until_idle()
        assert served.gauge("tokens_predicted_total") <= 1


def test_disconnecting_during_prefill_cancels_it_within_one_forward(serve_toy, gate):
    with serve_toy() as served:
        gate.close()
        with served.stream(TEXT, prompt="a" * 300) as lines:
            wait_until(lambda: gate.arrived == 1)
            del lines
        served.let_it_notice()
        gate.open()
        served.wait_until_idle()
        assert gate.arrived < 4  # of 19
        assert served.gauge("tokens_predicted_total") == 0


def test_disconnecting_in_the_queue_leaves_it(serve_toy, gate):
    with serve_toy(max_sequences=1, max_waiting=1) as served:
        gate.close()
        answers: list[Answer] = []
        first = in_background(served, answers, prompt="abc", max_tokens=3)
        wait_until(lambda: served.gauge("requests_processing") == 1)
        with served.stream(TEXT, prompt="abc"):
            wait_until(lambda: served.gauge("requests_deferred") == 1)
        wait_until(lambda: served.gauge("requests_deferred") == 0)
        gate.open()
        first.join()
        assert answers[0].status == 200


def test_keep_alive_comments(serve_toy, gate, monkeypatch):
    monkeypatch.setattr("ondevice.server.delivery.KEEP_ALIVE_S", 0.01)
    with serve_toy() as served:
        gate.close()
        with served.stream(TEXT, prompt="abc", max_tokens=2) as lines:
            assert next(lines) == ": keep-alive"
            gate.open()
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_replies_share_forwards(serve_toy, gate):
    """Two replies that are generated together equal the same replies generated alone."""
    with serve_toy(max_sequences=2) as served:
        alone = [served.post(TEXT, prompt=prompt, max_tokens=40, temperature=0).body for prompt in ("abc", "bca")]
        gate.close()
        answers = {}
        threads = []
        for prompt in ("abc", "bca"):

            def ask(prompt=prompt):
                answers[prompt] = served.post(TEXT, prompt=prompt, max_tokens=40, temperature=0).body

            threads.append(threading.Thread(target=ask))
            threads[-1].start()
        wait_until(lambda: served.gauge("requests_processing") == 2)
        gate.open()
        for thread in threads:
            thread.join()
        for prompt, one in zip(("abc", "bca"), alone, strict=True):
            assert answers[prompt]["choices"] == one["choices"]


def test_a_failing_engine_ends_its_reply_with_an_error(serve_toy, gate, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("an internal detail")

    with serve_toy() as served:
        monkeypatch.setattr("tests.fixtures.toy_engine.ToyEngine.forward", fail)
        answer = served.post(TEXT, prompt="abc")
        assert (answer.status, answer.body["error"]["type"]) == (500, "server_error")
        assert "an internal detail" not in answer.body["error"]["message"]
        [failure] = served.messages(TEXT, prompt="abc")
        assert failure["error"]["code"] == 500
        served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_the_server_cancels_replies(serve_toy, gate, stream):
    with serve_toy(context_length=4000) as served:
        gate.close()
        found = []

        def ask():
            if stream:
                found.append(served.messages(CHAT, messages=[{"role": "user", "content": "abc"}])[-1])
            else:
                found.append(served.post(TEXT, prompt="abc").body)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: gate.arrived == 1)
        served.server.stop()
        while thread.is_alive():  # the event loop stops a little later, and the toy engine would be done by then
            gate.step()
            thread.join(0.02)
    assert found[0]["error"]["code"] == 503


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"content": "abc"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_requests_that_generate_nothing_are_admitted_too(serve_toy, gate, path, fields):
    with serve_toy(max_sequences=1, max_waiting=0) as served:
        assert served.post(path, **fields).status == 200
        gate.close()
        answers: list[Answer] = []
        thread = in_background(served, answers, prompt="abc", max_tokens=3)
        wait_until(lambda: served.gauge("requests_processing") == 1)
        refused = served.post(path, **fields)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        gate.open()
        thread.join()
        assert served.post(path, **fields).status == 200
        served.wait_until_idle()


class Blocked:
    """Replaces a method: every call waits until it may end."""

    def __init__(self, really):
        self._really = really
        self.calls = 0
        self.may_end = threading.Event()

    def __get__(self, owner, kind):
        return partial(self, owner)

    def __call__(self, *arguments):
        self.calls += 1
        assert self.may_end.wait(300)
        return self._really(*arguments)


def test_slow_requests_fill_no_pool_that_others_need(serve_toy, gate, monkeypatch):
    """Their work has threads of its own: health, properties, the page and running replies go on."""
    with serve_toy(max_sequences=2) as served, served.stream(TEXT, prompt="abc", drafter="none") as lines:
        next(lines)
        blocked = Blocked(RequestFields.texts)
        monkeypatch.setattr(RequestFields, "texts", blocked)
        answers: list[Answer] = []
        threads = [in_background(served, answers, prompt="abc", max_tokens=2) for _ in range(12)]
        wait_until(lambda: blocked.calls == WORKERS)
        for path in ("/health", "/v1/models", "/props", "/metrics", "/", "/page.js"):
            assert served.get(path).status == 200
        for _ in range(20):
            next(lines)
        blocked.may_end.set()
        for thread in threads:
            thread.join()
        assert [answer.status for answer in answers] == [200] * 12


def test_clients_that_disconnect_before_their_work_begins(serve_toy, monkeypatch):
    with serve_toy() as served:
        blocked = Blocked(RequestFields.texts)
        monkeypatch.setattr(RequestFields, "texts", blocked)

        def entered(count):
            return lambda: blocked.calls == count

        connections = [served.connect() for _ in range(WORKERS + 6)]
        for number, connection in enumerate(connections):
            connection.request("POST", TEXT, b'{"prompt": "abc", "max_tokens": 2}')
            if number < WORKERS:
                wait_until(entered(number + 1))
        served.let_it_notice()
        for connection in connections:
            connection.close()
        served.let_it_notice()
        blocked.may_end.set()
        served.wait_until_idle()
        assert blocked.calls == WORKERS
        assert served.post(TEXT, prompt="abc", max_tokens=2).status == 200
        assert served.gauge("tokens_predicted_total") == 2


def options_of(number):
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 8 + number % 17,
        "temperature": (0.0, 0.7, 1.0)[number % 3],
        "seed": number % 5,
        "n": 1 + (number % 11 == 0),
    }


def ask(served, number):
    """The texts of a request; None if the client disconnected before, during or after prefill."""
    chance = random.Random(number)
    options, disconnects = options_of(number), chance.random() < 0.5
    if not disconnects:
        return [choice["text"] for choice in served.post(TEXT, **options).body["choices"]]
    lines_read = chance.randrange(4)
    if chance.random() < 0.3:
        connection = served.connect()
        connection.request("POST", TEXT, b"{}" if lines_read == 3 else json.dumps(options).encode())
        connection.sock.close()
        return None
    with served.stream(TEXT, **{**options, "max_tokens": 1500}) as lines:
        for _ in zip(range(lines_read), lines, strict=False):
            pass
    return None


def test_200_requests_with_disconnects_leak_nothing(served, served_model):
    """Half of the clients disconnect at random moments: memory and threads do not grow, other replies do not change."""

    def alone(number):
        options = options_of(number)
        seeds = range(options["seed"], options["seed"] + options["n"])
        named = {"max_new_tokens": options["max_tokens"], "temperature": options["temperature"], "drafter": "none"}
        return [served_model.generate(options["prompt"], seed=seed, **named).text for seed in seeds]

    def threads():
        return sum(thread.name.startswith("ondevice") for thread in threading.enumerate())

    before = served.gauge("tokens_predicted_total")
    with ThreadPoolExecutor(12) as clients:
        first = list(clients.map(lambda number: ask(served, number), range(REQUESTS // 2)))
        served.wait_until_idle()
        gc.collect()
        peak, kept = machine.peak_rss_bytes(), threads()
        second = list(clients.map(lambda number: ask(served, number), range(REQUESTS // 2, REQUESTS)))
        served.wait_until_idle()
    wait_until(lambda: threads() <= kept)
    gc.collect()
    assert machine.peak_rss_bytes() - peak < 64 * MEGABYTE
    answered = {number: texts for number, texts in enumerate([*first, *second]) if texts is not None}
    assert 60 < len(answered) < 140
    wanted = sum(options_of(number)["n"] * options_of(number)["max_tokens"] for number in answered)
    disconnected = REQUESTS - len(answered)
    assert served.gauge("tokens_predicted_total") - before - wanted < 100 * disconnected  # each asked for up to 1500
    for number, texts in answered.items():
        assert texts == alone(number), options_of(number)
    assert len(served_model._scheduler.batch) == 0
