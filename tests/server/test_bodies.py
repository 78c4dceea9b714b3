"""Bodies of requests: what is taken out of them before they are parsed, limits, and memory that slow clients hold."""

from __future__ import annotations

import base64
import gc
import json
import random
import socket
import threading
import weakref
from contextlib import closing

import pytest

from ondevice.server import bodies, replies
from ondevice.server.bodies import BLOCK, parse
from ondevice.server.requests import RequestError, RequestFields
from tests.server.served import wait_until

TEXT = "/v1/completions"
SMALL = {"prompt": "abc", "max_tokens": 2}


def test_a_body_with_media_is_parsed_as_without_them():
    chance = random.Random(1)
    for _ in range(60):
        media = [base64.b64encode(chance.randbytes(chance.randrange(4 * BLOCK))).decode() for _ in range(3)]
        text = chance.choice(["é😀", '"\\', "", "x" * BLOCK]) + media[0]
        whole = {"a": [{"url": f"data:;base64,{media[1]}"}, text, 1.5, None], media[2]: {"b": True}, "c": "\n"}
        body = json.dumps(whole, ensure_ascii=chance.random() < 0.5).encode()
        assert dict(parse(body)) == whole


WRITERS = {
    "php": lambda whole: json.dumps(whole).replace("/", r"\/"),
    "dotnet": lambda whole: json.dumps(whole).replace("+", r"\u002B"),
    "lower": lambda whole: json.dumps(whole).replace("+", r"\u002b"),
    "plain": json.dumps,
}
"""Ways to write the same JSON."""


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("line", ["", "\n", "\r\n"])
def test_base64_with_escapes_is_no_text(monkeypatch, writer, line):
    """Wherever its blocks are cut."""
    monkeypatch.setattr(bodies, "BLOCK", 64)
    monkeypatch.setattr(bodies, "MAX_TEXT_BYTES", 1000)
    media = base64.encodebytes(random.Random(1).randbytes(10_000)).decode().replace("\n", line)
    for shift in range(80):
        whole = {"a" * shift: "b", "é\n": f"data:;base64,{media}"}
        assert dict(parse(writer(whole).encode())) == whole


@pytest.mark.parametrize("escape", [r"\u4e00", r"\\", r"\"", r"\u002b"])
def test_no_escape_is_cut(monkeypatch, escape):
    monkeypatch.setattr(bodies, "BLOCK", 64)
    for shift in range(80):
        body = f'{{"{"a" * shift}": "{escape}{"c" * 200}"}}'
        assert dict(parse(body.encode())) == json.loads(body)


@pytest.mark.parametrize("escape", [r"\\/", r"\u4e00", r"\t", r"\b"])
def test_other_escapes_are_text(monkeypatch, escape):
    monkeypatch.setattr(bodies, "MAX_TEXT_BYTES", 8 * BLOCK)
    with pytest.raises(RequestError, match="besides base64"):
        parse(f'{{"a": "{f"AAAA{escape}" * 10 * BLOCK}"}}'.encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\\ud83d\\ude00", "b": ["\\ude00\\ud83d"]}', "surrogate"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": %b}' % (b"1" * 101), "digits"),
        (b'{"a": %b}' % (b"1" * 4 * BLOCK), "JSON"),
        (b'{"a": 0.%b}' % (b"1" * 101), "too long"),
        (b'{"a": %b}' % (b"t" * 4 * BLOCK), "JSON"),
        (b'{"a": "%b' % (b"t" * 4 * BLOCK), "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"a": "\xed\xa0\x80"}', "JSON"),
    ],
)
def test_it_is_no_json(body, message):
    with pytest.raises(RequestError, match=message) as caught:
        parse(body)
    assert caught.value.status == 400


def test_numbers_and_pairs_that_are_allowed():
    body = b'\xef\xbb\xbf{"a": [1e308, -0, %b, "\\ud83d\\ude00", "\xf0\x9f\x98\x80"]}' % (b"9" * 100)
    assert dict(parse(body)) == {"a": [1e308, 0, int("9" * 100), "😀", "😀"]}


@pytest.mark.parametrize("element", [b"[],", b"{},", b"0,", b'"",', b'"a,b",'])
def test_elements_are_counted_before_they_are_made(element, monkeypatch):
    body = b'{"a": [' + element * bodies.MAX_ELEMENTS + b"0]}"
    monkeypatch.setattr(bodies, "DECODER", None)
    with pytest.raises(RequestError, match="commas"):
        parse(body)


@pytest.mark.parametrize("element", [b'"a" :"b",', b'{"":0},', b'"a:",'])
def test_names_are_counted_before_they_are_made(element, monkeypatch):
    body = b'{"a": [' + element * bodies.MAX_NAMES + b"0]}"
    monkeypatch.setattr(bodies, "DECODER", None)
    with pytest.raises(RequestError, match="colons"):
        parse(body)


def test_text_is_limited_and_media_are_not(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_TEXT_BYTES", 8 * BLOCK)
    assert len(parse(b'{"a": "%b"}' % (b"A" * 40 * BLOCK))["a"]) == 40 * BLOCK
    with pytest.raises(RequestError, match="besides base64"):
        parse(b'{"a": "%b"}' % (b"A " * 20 * BLOCK))
    # One character outside of Latin-1 makes each of the others take two or four bytes.
    with pytest.raises(RequestError, match="base64"):
        parse(b'{"a": "%b\xf0\x9f\x98\x80"}' % (b"A" * 40 * BLOCK))
    assert parse(b'{"a": "%b\xf0\x9f\x98\x80"}' % (b"A" * 6 * BLOCK))["a"].endswith("A😀")


@pytest.fixture
def waiting_room(monkeypatch):
    """Room for one body of 200,000 bytes."""
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 300_000)


def half_sent(served, length=200_000, sent=100_000):
    """A connection with the beginning of a body."""
    connection = socket.create_connection((served.host, served.port))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()
    connection.sendall(head + b'{"prompt":"abc"'.ljust(sent))
    return connection


def long_request(served, answers):
    """Send a body of 200,000 bytes; returns the thread that waits for the answer."""
    body = json.dumps({**SMALL, "user": "x" * 200_000}).encode()
    thread = threading.Thread(target=lambda: answers.append(served.ask("POST", TEXT, body).status))
    thread.start()
    return thread


def test_a_long_body_waits_for_room_and_short_ones_do_not(serve_toy, waiting_room):
    with serve_toy() as served:
        answers: list[int] = []
        with closing(half_sent(served)):
            served.let_it_notice()
            thread = long_request(served, answers)
            for _ in range(20):
                assert served.post(TEXT, **SMALL).status == 200
            assert not answers
        thread.join()
        assert answers == [200]


def test_a_body_of_unknown_length_waits_for_room_too(serve_toy, waiting_room, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_REQUEST_BYTES", 250_000)
    with serve_toy() as served, closing(served.connect()) as connection:
        pieces = [b'{"max_tokens": 2, "prompt": "abc"', b" " * 200_000, b"}"]
        connection.request("POST", TEXT, iter(pieces), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        assert connection.getresponse().status == 200
        with closing(half_sent(served)):
            served.let_it_notice()
            with closing(served.connect()) as waiting:
                waiting.request(
                    "POST", TEXT, iter(pieces), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
                )
                assert served.post(TEXT, **SMALL).status == 200
                waiting.sock.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    waiting.getresponse()
        served.let_it_notice()
        assert served.ask("POST", TEXT, b" " * 249_000 + b"{}").status == 400


def test_a_body_that_does_not_arrive(serve_toy, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_S", 0.2)
    with serve_toy() as served, closing(half_sent(served)) as connection:
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
        assert b"did not arrive in time" in answer


def test_a_new_body_ends_the_oldest_of_too_many(serve_toy, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_RECEIVING", 2)
    with serve_toy() as served:
        connections = []
        for _ in range(2):
            connections.append(half_sent(served, 60_000, 100))
            served.let_it_notice()
        assert served.post(TEXT, **SMALL).status == 200
        assert connections[0].recv(100).startswith(b"HTTP/1.1 408 ")
        connections[1].sendall(b"}".rjust(60_000 - 100))
        assert connections[1].recv(100).startswith(b"HTTP/1.1 200 ")
        for connection in connections:
            connection.close()


def test_disconnecting_while_a_body_is_parsed(serve_toy, waiting_room, monkeypatch):
    """Its room is given back when the thread has ended with it, and the next body is parsed."""
    began, may_end = threading.Event(), threading.Event()
    really = bodies.parse

    def parse_slowly(body):
        began.set()
        assert may_end.wait(300)
        return really(body)

    with serve_toy() as served:
        monkeypatch.setattr(bodies, "parse", parse_slowly)
        with closing(half_sent(served, 200_000, 200_000 - 1)) as connection:
            connection.sendall(b"}")
            assert began.wait(300)
        monkeypatch.setattr(bodies, "parse", really)
        served.let_it_notice()
        answers: list[int] = []
        thread = long_request(served, answers)
        assert served.get("/health").status == 200
        assert not answers
        may_end.set()
        thread.join()
        assert answers == [200]
        served.wait_until_idle()


def test_two_long_bodies_are_parsed_at_a_time(serve_toy, monkeypatch):
    """Others wait until their requests are read, and short ones do not."""
    blocked, parsed, really = threading.Event(), [], bodies.parse

    def parse_long(body):
        if len(body) > bodies.SMALL_BYTES:
            parsed.append(len(body))
        return really(body)

    def read_slowly(fields, name):
        if "user" in fields:
            assert blocked.wait(300)
        return texts(fields, name)

    texts = RequestFields.texts
    monkeypatch.setattr(bodies, "parse", parse_long)
    monkeypatch.setattr(RequestFields, "texts", read_slowly)
    monkeypatch.setattr(replies, "WORKERS", bodies.MAX_PARSED + 1)
    with serve_toy() as served:
        answers: list[int] = []
        threads = [long_request(served, answers) for _ in range(6)]
        wait_until(lambda: len(parsed) == bodies.MAX_PARSED)
        for _ in range(20):
            assert served.post(TEXT, **SMALL).status == 200
        assert len(parsed) == bodies.MAX_PARSED
        blocked.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * 6


@pytest.mark.parametrize("path", [TEXT, "/v1/messages/count_tokens"])
def test_a_refused_request_leaves_memory_at_once(serve_toy, monkeypatch, path):
    """Without the garbage collector, which may not run for a while: few objects can hold much text."""
    parsed, really = [], bodies.parse

    def parse_and_note(body):
        fields = really(body)
        parsed.append(weakref.ref(fields))
        return fields

    monkeypatch.setattr(bodies, "parse", parse_and_note)
    with serve_toy() as served:
        served.let_it_notice()
        gc.disable()
        try:
            assert served.post(path, prompt="a" * 100_000, messages=[]).status == 400
            served.let_it_notice()
            wait_until(lambda: [fields() for fields in parsed] == [None])  # the thread that read it ends by the side
        finally:
            gc.enable()


def test_a_body_too_long_by_its_declared_length(serve_toy):
    with serve_toy() as served, closing(half_sent(served, bodies.MAX_REQUEST_BYTES + 1, 10)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        wait_until(lambda: served.get("/health").status == 200)
