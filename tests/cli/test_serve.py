"""`ondevice serve`: mistakes that are found before the model is loaded. `tests/server` tests the server."""

import json
import os
import socket
import subprocess
import sys

import pytest

from ondevice.server.running import Server
from tests.fixtures.model_made import write_bundle


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_names_the_extra(bundle, package):
    code = f"""
import sys
sys.modules[{package!r}] = None
from ondevice.cli.main import main
sys.exit(main(["serve", {str(bundle)!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"ondevice: `ondevice serve` needs {package}: pip install 'ondevice-runtime[serve]'\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-sequences", "0"], "max_sequences must be a whole number from 1 to 16, not 0"),
        (["--max-sequences", "17"], "max_sequences must be a whole number from 1 to 16, not 17"),
        (["--max-waiting", "-1"], "--max-waiting must be a finite number, 0 or more, not -1"),
        (["--idle-unload", "nan"], "--idle-unload must be a finite number, 0 or more, not nan"),
        (["--idle-unload", "inf"], "--idle-unload must be a finite number, 0 or more, not inf"),
        (["--api-key", "a", "--api-key-file", "b"], "--api-key and --api-key-file cannot be combined"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key"),
        (["--memory", "0"], "--memory must be a number of GB above 0, not 0.0"),
        (["--memory", "nan"], "--memory must be a number of GB above 0, not nan"),
        (["--memory", "inf"], "--memory must be a number of GB above 0, not inf"),
        (["--memory", "0.1"], "toy-model may take 0.54 GB with its cache, which is more than --memory"),
        (["--alias", "=x"], "--alias takes NAME or NAME=MODEL, and the name is empty"),
        (["--alias", "gpt=x"], "the alias 'gpt' stands for 'x', which is not served"),
        (["--port", "99999"], "a port is a number from 0 to 65535, not 99999"),
        (["--host", "300.1.1.1"], "cannot listen at 300.1.1.1"),
    ],
)
def test_mistakes(run, bundle, words, complaint):
    code, out, err = run("serve", bundle, *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken(run, bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", bundle, "--port", port)
    assert code == 2
    assert f"cannot listen at 127.0.0.1, port {port} (address already in use" in err


def test_the_address_is_a_line_of_json_for_every_port(run, bundle, monkeypatch):
    monkeypatch.setattr(Server, "run", lambda server: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for asked in (port, 0):
        _, out, _ = run("serve", bundle, "--port", asked)
        address = json.loads(out)
        assert address["url"] == f"http://127.0.0.1:{address['port']}"
        assert asked in (0, address["port"])
        assert address["pid"] == os.getpid()


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_it_warns_if_other_machines_can_use_it(run, bundle, monkeypatch, host, warns):
    monkeypatch.setattr(Server, "run", lambda server: None)
    code, out, err = run("serve", bundle, "--host", host, "--port", "0")
    assert code == 0
    assert json.loads(out)["host"] == host
    assert ("set a key with --api-key-file FILE" in err) == warns


def test_a_directory_of_bundles(run, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(Server, "run", lambda server: served.append(server._models))
    for name in ("b", "a"):
        write_bundle(tmp_path / "bundles" / name, name=name)
    (tmp_path / "bundles" / ".c.fetching").mkdir()
    words = ["--port", "0", "--memory", "1.5", "--alias", "gpt-4o", "--alias", "small=b"]
    code, _, err = run("serve", tmp_path / "bundles", *words)
    assert code == 0
    assert err.startswith("ondevice: a, b at http://127.0.0.1:")
    [models] = served
    assert models.find("gpt-4o").name == "a"
    assert models.find("small").name == "b"


def test_two_bundles_of_one_name_and_directory(run, bundle, tmp_path):
    code, _, err = run("serve", bundle, write_bundle(tmp_path / "other" / bundle.name))
    assert (code, err) == (2, f"ondevice: two bundles have the name {bundle.name!r}: serve one of them\n")


def test_a_damaged_bundle_of_a_directory_is_named(run, tmp_path):
    for name in ("a", "b"):
        write_bundle(tmp_path / "bundles" / name, name=name)
    path = tmp_path / "bundles" / "b"
    (path / "tokenizer.json").unlink()
    assert run("serve", tmp_path / "bundles")[2].startswith(f"ondevice: {path}/tokenizer.json is missing")
    (path / "bundle.json").write_text("{")
    code, _, err = run("serve", tmp_path / "bundles")
    assert code == 2
    assert err.startswith(f"ondevice: {path}: bundle.json is not valid JSON (")
