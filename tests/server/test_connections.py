"""Limits before there is a request: the number of connections, and the time for headers."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack, closing, suppress

import pytest

from ondevice.server import running
from tests.server.served import Answer, wait_until

TEXT = "/v1/completions"
HALF = b"GET /health HTTP/1.1\r\nhost: localh"


def connect(served, sent=b""):
    connection = socket.create_connection((served.host, served.port), timeout=300)
    connection.sendall(sent)
    return closing(connection)


def received(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
@pytest.mark.parametrize("sent", [b"", HALF])
def test_headers_that_do_not_arrive(serve_toy, monkeypatch, before, sent):
    with serve_toy() as served:
        if not before:
            monkeypatch.setattr(running, "MAX_HEADER_S", 0.3)
        with connect(served) as connection:
            served.let_it_notice()
            monkeypatch.setattr(running, "MAX_HEADER_S", 0.3)  # not for the headers of the first request
            connection.sendall(before + sent)
            answer = received(connection)
    assert answer.count(b"HTTP/1.1 200 ") == bool(before)
    last = answer.rpartition(b"HTTP/1.1 408 ")[2]
    head, _, body = last.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "timeout_error"


def test_a_request_may_take_longer_than_its_headers(serve_toy, gate, monkeypatch):
    monkeypatch.setattr(running, "MAX_HEADER_S", 0.1)
    with serve_toy() as served:
        gate.close()
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(served.post(TEXT, prompt="abc", max_tokens=2)))
        thread.start()
        wait_until(lambda: gate.arrived == 1)
        with connect(served, HALF) as connection:
            received(connection)  # its time is over
        gate.open()
        thread.join()
    assert answers[0].status == 200


def test_a_new_connection_replaces_the_oldest_without_a_request(serve_toy, monkeypatch):
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 6)
    with serve_toy() as served, ExitStack() as stack:
        connections = [stack.enter_context(connect(served, HALF)) for _ in range(60)]
        assert served.get("/health").status == 200
        for connection in connections[:-6]:
            with suppress(ConnectionResetError):
                assert received(connection) == b""
        connections[-1].sendall(b"ost\r\nconnection: close\r\n\r\n")
        assert received(connections[-1]).startswith(b"HTTP/1.1 200 ")


UNREAD = b"GET /vendor/noto-sans-math.woff2 HTTP/1.1\r\nhost: localhost\r\n\r\n"


REQUESTS = 200


def connections_that_do_not_read(served, stack, count, monkeypatch):
    """Connections that ask for more than the buffers hold, and read nothing, once the server has noticed that of all
    that it keeps. Small buffers fill once: those of usual size grow, and the server could write again.
    """
    accepted, made = [], running.Connection.connection_made

    def connection_made(connection, transport):
        accepted.append(connection)
        made(connection, transport)

    monkeypatch.setattr(running.Connection, "connection_made", connection_made)
    clients = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((served.host, served.port))
        with suppress(ConnectionError):  # cut for a later one, or refused
            client.sendall(UNREAD * REQUESTS)
    wait_until(lambda: len(accepted) == count and all(each._is_unread for each in accepted if not each._has_ended))
    return clients


def test_connections_that_do_not_read_make_room(serve_toy, monkeypatch):
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 4)
    with serve_toy() as served, ExitStack() as stack:
        connections_that_do_not_read(served, stack, 8, monkeypatch)
        for _ in range(8):
            with connect(served, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") as other:
                assert received(other).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_does_not_read_is_cut_in_the_end(serve_toy, monkeypatch):
    with serve_toy() as served, ExitStack() as stack:
        monkeypatch.setattr(running, "MAX_UNREAD_S", 0.2)
        client = socket.create_connection((served.host, served.port), timeout=300)
        stack.enter_context(closing(client))
        client.sendall(UNREAD * REQUESTS)

        def is_cut():
            try:
                client.send(b"\n")
            except OSError:
                return True
            return False

        wait_until(is_cut)


def test_a_client_that_reads_slowly_gets_everything(serve_toy, monkeypatch):
    monkeypatch.setattr(running, "MAX_HEADER_S", 300)
    with serve_toy() as served, connect(served, UNREAD * REQUESTS) as connection:
        served.let_it_notice()
        connection.sendall(UNREAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert received(connection).count(b"HTTP/1.1 200 ") == REQUESTS + 1


def test_too_many_requests_at_a_time(serve_toy, gate, monkeypatch):
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 3)
    with serve_toy() as served:
        gate.close()
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=lambda: answers.append(served.post(TEXT, prompt="abc", max_tokens=2)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: running_requests(served) == 3)
        with connect(served) as connection:
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "unavailable_error"
        gate.open()
        for thread in threads:
            thread.join()
        assert [each.status for each in answers] == [200] * 3
        assert served.get("/health").status == 200


def running_requests(served):
    """Connections whose request has arrived."""
    return sum(each._is_answering for each in served.server._uvicorn.server_state.connections)


CHUNKED = b" HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("request_line", [b"GET /health", b"POST /tokenize"])
def test_a_malformed_body(serve_toy, caplog, request_line):
    """The client gets one error, and the application's response is not sent after it."""
    with serve_toy() as served:
        with connect(served, request_line + CHUNKED + b"zz\r\n") as connection:
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        served.let_it_notice()
    assert not caplog.records


def test_a_malformed_body_after_the_response(serve_toy, caplog):
    with serve_toy() as served, connect(served, b"GET /health" + CHUNKED) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in received(connection)
        served.let_it_notice()
    assert not caplog.records


def test_a_malformed_body_behind_another_request(serve_toy, gate, caplog):
    """It arrives while the first request is answered, which ends as it should."""
    fields = json.dumps({"prompt": "abc", "stream": True, "drafter": "none"}).encode()
    with serve_toy() as served:
        gate.close()
        with connect(served, b"POST /v1/completions" + CHUNKED) as connection:
            connection.sendall(b"%x\r\n%b\r\n" % (len(fields), fields))
            connection.sendall(b"0\r\n\r\nGET /health" + CHUNKED + b"zz\r\n")
            wait_until(lambda: gate.arrived == 1)
            gate.open()
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 400 ") == 1
        served.wait_until_idle()
    assert not caplog.records


def test_a_server_that_stops_does_not_wait_for_a_body(serve_toy, caplog):
    with serve_toy() as served:
        with connect(
            served, b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        ) as connection:
            wait_until(lambda: running_requests(served) == 1)
            served.server.stop()
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "the server is stopping"
    assert not caplog.records


@pytest.mark.parametrize(("size", "is_possible"), [(1, False), (100, False), (running.MIN_CHUNK, True)])
def test_small_chunks(serve_toy, size, is_possible):
    """They would take the event loop longer than the rest of a request."""
    count = 20 * running.FREE_CHUNKS
    body = json.dumps({"prompt": "abc", "max_tokens": 1, "user": "a" * count * size}).encode()
    chunks = [b"%x\r\n%b\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in range(0, len(body), size)]
    answer = b""
    with serve_toy() as served, connect(served, b"POST /v1/completions" + CHUNKED) as connection:
        with suppress(ConnectionError):  # the server does not read what follows its error
            connection.sendall(b"".join(chunks) + b"0\r\n\r\n")
            answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 200 ") if is_possible else answer[:12] in (b"HTTP/1.1 400", b"")
        assert served.get("/health").status == 200


def test_nothing_is_written_about_malformed_requests(serve_toy, caplog):
    with serve_toy() as served, caplog.at_level("WARNING"):
        for sent in (b"\x16\x03\x01\x02\0", b"GET / HTTP/9\r\n\r\n", HALF + b"\r\n\r\n" * 3, b"x" * 100_000):
            with connect(served, sent + b"\r\n\r\n") as connection:
                connection.shutdown(socket.SHUT_WR)
                assert received(connection).startswith(b"HTTP/1.1 4")
        assert served.get("/health", Connection="upgrade", Upgrade="websocket").status == 200
    assert not caplog.records
