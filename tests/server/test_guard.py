"""Access control: Host and Origin headers, API key."""

import pytest

from ondevice.server.guard import Rules

MODELS = "/v1/models"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8642", "[::1]:80", "LOCALHOST:1", "192.168.0.7", "localhost."]
)
def test_hosts_of_this_machine_are_allowed(served, host):
    assert served.get(MODELS, Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "[x]"])
def test_other_hosts_are_refused(served, host):
    answer = served.get(MODELS, Host=host)
    assert answer.status == 403
    assert answer.body["error"]["type"] == "permission_error"


def test_other_origins_are_refused(served):
    assert served.ask("POST", "/tokenize", {"content": "a"}, Origin="https://evil.example").status == 403
    for origin in ("null", "http://[", "http://[::1", "//"):
        assert served.ask("POST", "/tokenize", {"content": "a"}, Origin=origin).status == 403
    answer = served.ask("POST", "/tokenize", {"content": "a"}, Origin=served.url)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


def test_allowed_host_and_origin(serve_toy):
    origin = "https://app.example"
    with serve_toy(rules=Rules(hosts=["pi.lan"], origins=[origin], api_key="secret")) as served:
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
        preflight = served.ask("OPTIONS", "/tokenize", Origin=origin, **asked)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        answer = served.ask("POST", "/tokenize", {"content": "a"}, Origin=origin, Authorization="Bearer secret")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == origin
        assert served.ask("OPTIONS", "/tokenize", Origin="https://evil.example", **asked).status == 403
        assert served.get("/health", Host="pi.lan").status == 200
        refused = served.ask("POST", "/tokenize", {"content": "a"}, Origin=origin)
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == origin  # else the page cannot ask for the key


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer  secret"}, 200),
        ({"x_api_key": "secret"}, 200),
        ({"x_api_key": "s\xe9cret"}, 401),
    ],
)
def test_api_key(serve_toy, headers, status):
    with serve_toy(rules=Rules(api_key="secret")) as served:
        answer = served.get(MODELS, **headers)
        assert answer.status == status
        assert served.get("/health").status == 200
        if status == 401:
            assert answer.body["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_all_origins_can_be_allowed(serve_toy):
    with serve_toy(rules=Rules(origins=["*"])) as served:
        assert served.get(MODELS, Origin="https://any.example").headers["access-control-allow-origin"] == (
            "https://any.example"
        )
