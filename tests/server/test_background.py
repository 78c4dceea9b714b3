"""Background responses: begun, left, joined at any event, cancelled, deleted, and limited."""

import asyncio
import json
import threading
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import openai
import pytest

from ondevice.server import background
from ondevice.server.delivery import ServerSentEvent
from ondevice.server.replies import Replies
from tests.server.served import PATIENCE_S, wait_until

RESPONSES = "/v1/responses"


def client_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def begin(served, **fields):
    """A background response of the toy, whose texts do not end by themselves."""
    return served.post(RESPONSES, **{"input": "abc", "background": True, "max_output_tokens": 20, **fields}).body


def events(served, path, **headers):
    """Numbers and objects of the events of a stream, until it ends."""
    with closing(served.connect()) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [event.split("\n") for event in response.read().decode().split("\n\n") if event.startswith("id: ")]
    return [(int(lines[0][4:]), json.loads(lines[2][6:])) for lines in found]


def finished(served, response_id):
    wait_until(lambda: served.get(f"{RESPONSES}/{response_id}").body["status"] not in ("queued", "in_progress"))
    return served.get(f"{RESPONSES}/{response_id}").body


def test_it_goes_on_without_its_client(serve_toy, gate):
    with serve_toy() as served:
        gate.close()
        begun = begin(served)
        assert (begun["status"], begun["background"], begun["store"]) == ("queued", True, True)
        assert begun["output"] == []
        wait_until(lambda: gate.arrived == 1)
        assert served.get(f"{RESPONSES}/{begun['id']}").body["status"] == "in_progress"
        gate.open()
        whole = finished(served, begun["id"])
        assert (whole["status"], whole["id"]) == ("incomplete", begun["id"])
        assert whole["usage"]["output_tokens"] == 20
        plain = served.post(RESPONSES, input="abc", max_output_tokens=20).body
        assert whole["output"][0]["content"] == plain["output"][0]["content"]
        assert whole["output"][0]["status"] == plain["output"][0]["status"] == "incomplete"


def test_openai_s_client(serve_toy, gate):
    with serve_toy() as served, client_of(served) as client:
        response = client.responses.create(model="toy-model", input="abc", background=True, max_output_tokens=20)
        while response.status in ("queued", "in_progress"):
            response = client.responses.retrieve(response.id)
        kinds = [event.type for event in client.responses.retrieve(response.id, stream=True)]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.incomplete"
        rest = list(client.responses.retrieve(response.id, stream=True, starting_after=5))
        assert [event.sequence_number for event in rest] == list(range(6, len(kinds)))
        assert client.responses.cancel(response.id).status == "incomplete"
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError, match="only `background` ones are kept"):
            client.responses.retrieve(response.id)


def test_listeners_join_at_any_event_while_it_runs(serve_toy, gate):
    """The first one leaves; others get the rest from the number that they name, in either way."""
    with serve_toy() as served:
        gate.close(behind=4)
        with served.stream(RESPONSES, input="abc", background=True, max_output_tokens=20) as lines:
            read = [line for _, line in zip(range(12), lines, strict=False)]
        data = [json.loads(line[6:]) for line in read if line.startswith("data: ")]
        response_id = data[0]["response"]["id"]
        served.let_it_notice()
        assert served.get(f"{RESPONSES}/{response_id}").body["status"] == "in_progress"
        gate.open()
        path = f"{RESPONSES}/{response_id}"
        every = events(served, f"{path}?stream=true")
        assert (
            [number for number, _ in every]
            == [event["sequence_number"] for _, event in every]
            == list(range(len(every)))
        )
        assert [event for _, event in every[: len(data)]] == data
        assert events(served, f"{path}?stream=true&starting_after=3") == every[4:]
        assert events(served, path, **{"Last-Event-ID": "7"}) == every[8:]
        assert events(served, f"{path}?stream=true&starting_after=100000") == []
        text = "".join(event["delta"] for _, event in every if event["type"] == "response.output_text.delta")
        assert text == finished(served, response_id)["output"][0]["content"][0]["text"]


def test_cancelling_and_deleting_free_the_slot(serve_toy, gate):
    with serve_toy(max_sequences=1) as served:
        gate.close(behind=3)
        ids = [begin(served, max_output_tokens=300)["id"] for _ in range(3)]
        wait_until(lambda: gate.arrived >= 4)
        gate.open()
        cancelled = served.post(f"{RESPONSES}/{ids[0]}/cancel").body
        assert (cancelled["status"], cancelled["usage"]) == ("cancelled", None)
        assert events(served, f"{RESPONSES}/{ids[0]}?stream=true")[-1][1]["response"] == cancelled
        assert served.post(f"{RESPONSES}/{ids[0]}/cancel").body == cancelled
        assert served.ask("DELETE", f"{RESPONSES}/{ids[1]}").body == {
            "id": ids[1],
            "object": "response",
            "deleted": True,
        }
        assert served.get(f"{RESPONSES}/{ids[1]}").status == 404
        assert served.ask("DELETE", f"{RESPONSES}/{ids[1]}").status == 404
        served.post(f"{RESPONSES}/{ids[2]}/cancel")
        served.wait_until_idle()


def test_a_listener_of_a_cancelled_response_gets_its_end(serve_toy, gate):
    with serve_toy() as served:
        gate.close(behind=2)
        response_id = begin(served, max_output_tokens=300)["id"]
        with closing(served.connect()) as connection:
            connection.request("GET", f"{RESPONSES}/{response_id}?stream=true")
            response = connection.getresponse()
            response.readline()
            gate.open()
            served.post(f"{RESPONSES}/{response_id}/cancel")
            assert b'"status": "cancelled"' in response.read()


@pytest.mark.parametrize("number", ["-1", "x", "", "1e3", "9999999999999"])
def test_starting_after_is_the_number_of_an_event(serve_toy, number):
    with serve_toy() as served:
        response_id = begin(served)["id"]
        answer = served.get(f"{RESPONSES}/{response_id}?stream=true&starting_after={number}")
        assert answer.status == 400
        assert "starting_after must be the number of an event" in answer.body["error"]["message"]


def test_it_must_be_stored(served):
    answer = served.post(RESPONSES, input="x", background=True, store=False)
    assert (answer.status, answer.body["error"]["param"]) == (400, "store")


def test_a_new_response_takes_the_place_of_the_oldest_that_has_ended(serve_toy, gate, monkeypatch):
    monkeypatch.setattr(background, "MAX_STORED", 2)
    with serve_toy() as served:
        first = begin(served)["id"]
        finished(served, first)
        gate.close()
        running = [begin(served)["id"] for _ in range(2)]
        assert served.get(f"{RESPONSES}/{first}").status == 404
        answer = served.post(RESPONSES, input="abc", background=True)
        assert (answer.status, answer.headers["retry-after"]) == (503, "60")
        gate.open()
        for each in running:
            assert finished(served, each)["status"] == "incomplete"
        served.wait_until_idle()


def test_their_events_are_limited(serve_toy, monkeypatch):
    with serve_toy() as served:
        first = begin(served)["id"]
        finished(served, first)
        monkeypatch.setattr(background, "MAX_STORED_BYTES", 10_000)
        second = begin(served, max_output_tokens=300)["id"]
        failed = finished(served, second)
        assert failed["status"] == "failed"
        assert "take more than" in failed["error"]["message"]
        assert served.get(f"{RESPONSES}/{first}").status == 404  # it made room first
        assert events(served, f"{RESPONSES}/{second}?stream=true")[-1][1]["type"] == "response.failed"


def test_their_time_is_limited(serve_toy, gate, monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING_S", 0.05)
    with serve_toy() as served:
        gate.close()
        response_id = begin(served)["id"]
        wait_until(lambda: gate.arrived == 1)
        gate.open()
        body = finished(served, response_id)
        if body["status"] == "failed":  # a fast machine may have ended it in time
            assert "ends after" in body["error"]["message"]


def test_they_are_forgotten_after_their_end(serve_toy, monkeypatch):
    monkeypatch.setattr(background, "KEPT_S", 0.0)
    with serve_toy() as served:
        response_id = begin(served)["id"]
        wait_until(lambda: served.get(f"{RESPONSES}/{response_id}").status == 404)


def test_a_stopping_server_ends_them(serve_toy, gate):
    with serve_toy() as served:
        gate.close(behind=3)
        begin(served, max_output_tokens=300)
        wait_until(lambda: gate.arrived >= 4)


def test_a_cancel_that_comes_while_the_end_is_written_is_too_late():
    """The end is written in a thread, which a cancel does not stop."""
    writing, go_on = threading.Event(), threading.Event()

    def end():
        yield ServerSentEvent({"type": "output_text.done"})
        writing.set()
        go_on.wait(PATIENCE_S)
        yield ServerSentEvent({"type": "response.completed"})

    async def work(function, *arguments):
        return await asyncio.to_thread(function, *arguments)

    async def no_events(*_):
        for each in list[str]():
            yield each

    async def cancelled_while_it_ends():
        replies: Any = SimpleNamespace(work=work, close=mock.AsyncMock())
        writer = mock.MagicMock(closing=end, whole=lambda: {"status": "completed"})
        response = background.StoredResponse(replies, writer)
        with mock.patch.object(background, "written", no_events):
            response.task = asyncio.create_task(response.generate(lambda: None))
            await asyncio.to_thread(writing.wait, PATIENCE_S)
            response.task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait((response.task,))
        writer.cancelled.assert_not_called()
        return response

    response = asyncio.run(cancelled_while_it_ends())
    assert len(response.events) == 2
    assert response.whole() == {"status": "completed"}


def test_a_listener_that_waits_is_sent_comments(monkeypatch):
    monkeypatch.setattr(background, "KEEP_ALIVE_S", 0.01)

    async def listen():
        response = background.StoredResponse(mock.MagicMock(), mock.MagicMock())
        return await asyncio.wait_for(anext(response.follow(-1)), PATIENCE_S)

    assert asyncio.run(listen()) == ": keep-alive\n\n"


def test_events_of_the_queue_the_prompt_and_the_rounds(serve_toy, gate):
    """They are sent to those who ask for them, and join the numbers of the stream."""
    with serve_toy(max_sequences=1) as served:
        gate.close()
        wanted = {"input": "abc" * 20, "return_progress": True, "return_rounds": True}
        ids = [begin(served, **wanted)["id"] for _ in range(3)]
        wait_until(lambda: gate.arrived == 1)
        gate.open()
        for response_id in ids:
            finished(served, response_id)
        streams = [[event for _, event in events(served, f"{RESPONSES}/{each}?stream=true")] for each in ids]
        queued = [[event for event in each if event["type"] == "response.queued"] for each in streams]
        assert [[event["queue_place"] for event in each] for each in queued] == [[], [1], [2, 1]]
        assert {event["response"]["status"] for each in queued for event in each} == {"queued"}
        for each in streams:
            assert [event["sequence_number"] for event in each] == list(range(len(each)))
            progress = [event["prompt_progress"] for event in each if event["type"] == "response.prompt_progress"]
            assert progress[-1]["processed"] == progress[-1]["total"]
            rounds = [event["round"] for event in each if event["type"] == "response.round"]
            assert sum(each["tokens"] for each in rounds) == 20
            assert set(rounds[0]) == {"tokens", "drafted", "accepted", "source", "time_ms"}
        plain = begin(served)["id"]
        finished(served, plain)
        kinds = {event["type"] for _, event in events(served, f"{RESPONSES}/{plain}?stream=true")}
        assert {"response.queued", "response.prompt_progress", "response.round"}.isdisjoint(kinds)


def test_a_reply_that_leaves_the_queue_moves_the_others_up(serve_toy, gate):
    with serve_toy(max_sequences=1) as served:
        gate.close()
        first, second, third = (begin(served, return_progress=True)["id"] for _ in range(3))
        wait_until(lambda: gate.arrived == 1)
        served.ask("DELETE", f"{RESPONSES}/{second}")
        gate.open()
        finished(served, third)
        kinds = [event for _, event in events(served, f"{RESPONSES}/{third}?stream=true")]
        assert [event["queue_place"] for event in kinds if event["type"] == "response.queued"] == [2, 1]
        assert finished(served, first)["status"] == "incomplete"


def test_a_reply_that_is_cancelled_while_it_ends_gives_its_model_back():
    """The second cancel comes while the generation ends, which can take a forward."""
    left = []
    queue: Any = SimpleNamespace(leave=lambda: left.append("queue"))
    manager: Any = SimpleNamespace(release=lambda: left.append("model"))

    async def cancel_twice():
        replies = Replies(mock.Mock(), manager, queue, mock.Mock())
        ended = asyncio.Event()

        async def generate():
            while not ended.is_set():
                with suppress(asyncio.CancelledError):
                    await ended.wait()

        replies._tasks = [asyncio.create_task(generate())]
        ending = asyncio.create_task(replies.close())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.sleep(0)
        ended.set()
        await asyncio.gather(ending, *replies._tasks, return_exceptions=True)

    asyncio.run(cancel_twice())
    assert sorted(left) == ["model", "queue"]
