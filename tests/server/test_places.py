"""Who waits, who has to come again, and who has left."""

import threading

import pytest

from tests.server.served import Answer, wait_until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def in_background(served, answers, **fields):
    thread = threading.Thread(target=lambda: answers.append(served.post(TEXT, **fields)))
    thread.start()
    return thread


def test_requests_wait_in_a_queue_of_some_length(serve_toy, gate):
    with serve_toy(places=2, most_waiting=1) as served:
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


def test_a_client_that_leaves_ends_its_reply(serve_toy, gate):
    with serve_toy() as served:
        gate.close(behind=20)
        with served.stream(TEXT, prompt="abc", drafter="none") as lines:
            next(lines)
            assert served.gauge("requests_processing") == 1
        served.let_it_notice()
        gate.open()
        served.wait_until_idle()
        assert served.gauge("tokens_predicted_total") <= 22


def test_one_that_waits_for_a_whole_reply_can_leave(serve_toy, gate):
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


def test_a_prompt_is_left_within_one_forward(serve_toy, gate):
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


def test_one_that_waits_in_the_queue_can_leave(serve_toy, gate):
    with serve_toy(places=1, most_waiting=1) as served:
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


def test_comments_keep_a_silent_connection_open(serve_toy, gate, monkeypatch):
    monkeypatch.setattr("ondevice.server.delivery.KEEP_ALIVE_S", 0.01)
    with serve_toy() as served:
        gate.close()
        with served.stream(TEXT, prompt="abc", max_tokens=2) as lines:
            assert next(lines) == ": keep-alive"
            gate.open()
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_replies_share_forwards(serve_toy, gate):
    """Of two that begin together, each says what it says alone."""
    with serve_toy(places=2) as served:
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
        raise RuntimeError("a fault below")

    with serve_toy() as served:
        monkeypatch.setattr("tests.toy_engine.ToyEngine.forward", fail)
        answer = served.post(TEXT, prompt="abc")
        assert (answer.status, answer.body["error"]["type"]) == (500, "server_error")
        assert "a fault below" not in answer.body["error"]["message"]
        [failure] = served.messages(TEXT, prompt="abc")
        assert failure["error"]["code"] == 500
        served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_replies_are_cancelled_when_the_server_ends(serve_toy, gate, stream):
    with serve_toy() as served:
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
        while thread.is_alive():  # it takes effect in the event loop, and the toy would be done by then
            gate.step()
            thread.join(0.02)
    assert found[0]["error"]["code"] == 503
