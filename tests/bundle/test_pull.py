"""`pull`: a bundle arrives whole and right, or not at all, and no byte is fetched twice without need."""

import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants

import ondevice
from ondevice import hub as pulling
from ondevice.bundle import MANIFEST, Bundle
from ondevice.bundle_format.manifest import FileEntry
from ondevice.errors import (
    BundleCorruptError,
    BundleError,
    HubError,
    MissingDependencyError,
    UnsupportedBundleError,
    UsageError,
)
from ondevice.files import lock
from ondevice.hub import Destination
from tests.conftest import ROOT
from tests.fixtures.hub import serving
from tests.fixtures.model_made import write_bundle

REPOSITORY, WEIGHTS = "someone/toy", "target.onnx.data"


@pytest.fixture
def bundle(tmp_path):
    return with_weights(write_bundle(tmp_path / "made"), 3_000_000)


def with_weights(directory, size, seed=0):
    """A file that is worth breaking."""
    content = random.Random(seed).randbytes(size)
    (directory / WEIGHTS).write_bytes(content)
    opened = Bundle.open(directory).manifest
    files = {**opened.files, WEIGHTS: FileEntry(size, hashlib.sha256(content).hexdigest())}
    (directory / MANIFEST).write_text(dataclasses.replace(opened, files=files).to_json(), "utf-8")
    return directory


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("ONDEVICE_HOME", str(home))
    return home


@pytest.fixture
def hub(bundle, home, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # for other processes; this one has read it already
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(pulling, "PAUSE_S", 0.001)
    monkeypatch.setattr(pulling, "PIECE", 1 << 16)
    with serving() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        made.offer(REPOSITORY, bundle)
        yield made


def test_a_bundle_arrives(hub, home, bundle):
    told = []
    out = ondevice.pull(REPOSITORY, on_progress=lambda done, total: told.append((done, total)))
    assert out == home / "toy"
    assert Bundle.open("toy", verify_hashes=True).manifest == Bundle.open(bundle).manifest
    assert [path.name for path in home.iterdir()] == ["toy"]
    total = Bundle.open(bundle).manifest.size
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert {path.split("/")[4] for path, _, _ in hub.seen[1:]} == {hub.commit}  # of the manifest's commit


def test_one_that_is_there_is_not_fetched_again(hub):
    ondevice.pull(REPOSITORY)
    hub.seen.clear()
    ondevice.pull(REPOSITORY)
    assert [path.rsplit("/", 1)[1] for path, _, _ in hub.seen] == [MANIFEST]


@pytest.mark.parametrize("fault", ["broken", "too long", "503", "429", "shifted"])
def test_what_breaks_off_goes_on_where_it_was(hub, fault):
    hub.faults[WEIGHTS] = ["broken", fault, "broken", fault]
    out = ondevice.pull(REPOSITORY)
    Bundle.open(out, verify_hashes=True)
    ranges = hub.asked(WEIGHTS)
    assert ranges[0] is None
    assert ranges[1] is not None
    assert int(ranges[1].removeprefix("bytes=").removesuffix("-")) > 0


def test_a_manifest_that_breaks_off_is_asked_for_again(hub):
    hub.faults[MANIFEST] = ["broken", "500"]
    Bundle.open(ondevice.pull(REPOSITORY))
    assert len(hub.asked(MANIFEST)) == 3


def test_a_server_without_ranges_begins_again(hub):
    hub.knows_ranges = False
    hub.faults[WEIGHTS] = ["broken", "broken"]
    Bundle.open(ondevice.pull(REPOSITORY), verify_hashes=True)


def test_it_gives_up_and_the_next_one_goes_on(hub, home):
    hub.faults[WEIGHTS] = ["broken", *["503"] * pulling.MAX_FAILURES]
    with pytest.raises(HubError, match="continues from here"):
        ondevice.pull(REPOSITORY)
    assert not (home / "toy").exists()
    hub.seen.clear()
    Bundle.open(ondevice.pull(REPOSITORY), verify_hashes=True)
    assert hub.asked(WEIGHTS)[0] is not None
    assert hub.asked("tokenizer.json") == []  # it was there


def test_a_wrong_byte_is_found(hub, home):
    hub.faults[WEIGHTS] = ["altered"] * 2
    with pytest.raises(HubError, match=f"{WEIGHTS} of {REPOSITORY} is damaged"):
        ondevice.pull(REPOSITORY)
    assert not (home / "toy").exists()
    hub.faults.clear()
    Bundle.open(ondevice.pull(REPOSITORY), verify_hashes=True)


def test_what_lay_there_wrong_is_fetched_anew(hub, home):
    unfinished = home / ".toy.fetching"
    unfinished.mkdir(parents=True)
    (unfinished / WEIGHTS).write_bytes(bytes(1_000_000))
    (unfinished / "of another revision").write_bytes(b"x")
    out = ondevice.pull(REPOSITORY)
    Bundle.open(out, verify_hashes=True)
    assert not (out / "of another revision").exists()


@pytest.mark.parametrize("change", [b"", b"and more"])
def test_lengths_that_are_not_those_of_the_manifest(hub, home, change):
    for path in [path for path in hub.files if path.endswith(WEIGHTS)]:
        hub.files[path] = hub.files[path][:-5] + change
    with pytest.raises(HubError, match=r"bundle\.json says"):
        ondevice.pull(REPOSITORY)
    assert not (home / "toy").exists()


def test_a_body_that_does_not_end(hub):
    hub.faults[WEIGHTS] = ["endless"]
    with pytest.raises(HubError, match="longer than"):
        ondevice.pull(REPOSITORY)


def edited(hub, change):
    for path in [path for path in hub.files if path.endswith(MANIFEST)]:
        data = json.loads(hub.files[path])
        change(data)
        hub.files[path] = json.dumps(data).encode()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a\\b", "bundle.json", "a\nb"])
def test_names_that_lead_elsewhere(hub, home, name):
    def change(data):
        data["files"][name] = {"size": 1, "sha256": "0" * 64}
        del data["sha256"]

    edited(hub, change)
    with pytest.raises(BundleCorruptError, match="someone/toy"):
        ondevice.pull(REPOSITORY)
    assert not home.exists()


def test_a_manifest_of_another_version(hub):
    edited(hub, lambda data: data.update(schema=99))
    with pytest.raises(UnsupportedBundleError):
        ondevice.pull(REPOSITORY)


def test_an_altered_manifest(hub):
    edited(hub, lambda data: data["target"].update(context_length=data["target"]["context_length"] - 1))
    with pytest.raises(BundleError, match="altered"):
        ondevice.pull(REPOSITORY)


def test_a_checkpoint_is_no_bundle(hub):
    hub.files["/google/gemma/resolve/main/config.json"] = b"{}"
    with pytest.raises(HubError, match="`ondevice export google/gemma`"):
        ondevice.pull("google/gemma")
    with pytest.raises(HubError, match=r"there is no bundle\.json"):
        ondevice.pull("google/nothing")


def test_permission(hub, monkeypatch, tmp_path):
    hub.needed_token = "hf_secret"
    with pytest.raises(HubError, match="accept its terms"):
        ondevice.pull(REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ondevice.pull(REPOSITORY, name="one")
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_secret\n")  # as `hf auth login` leaves it
    ondevice.pull(REPOSITORY, name="two")


def test_the_token_is_told_to_the_hub_alone(hub, bundle, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving() as elsewhere:
        elsewhere.offer(REPOSITORY, bundle)
        hub.moved_to = elsewhere.url
        elsewhere.faults[WEIGHTS] = ["broken"]
        Bundle.open(ondevice.pull(REPOSITORY), verify_hashes=True)
        assert {token for _, _, token in hub.seen} == {"Bearer hf_secret"}
        assert {token for _, _, token in elsewhere.seen} == {None}
        assert elsewhere.asked(WEIGHTS)[1] is not None  # but the range is


def test_nobody_there(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="out of reach"):
        ondevice.pull(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        ondevice.pull(REPOSITORY)


def test_without_huggingface_hub(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="pip install huggingface_hub"):
        ondevice.pull(REPOSITORY)
    assert hub.seen == []


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "https://", "https://[bad"])
def test_an_endpoint_that_is_none(hub, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(HubError, match="HF_ENDPOINT must begin with https://"):
        ondevice.pull(REPOSITORY)


def test_a_full_disk_is_seen_before(hub, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    with pytest.raises(HubError, match=r"0\.0 GB are left to download, and 0\.0 GB are free"):
        ondevice.pull(REPOSITORY)
    assert hub.asked(WEIGHTS) == []


def test_what_does_not_fit_into_memory_is_said(hub, monkeypatch, caplog):
    monkeypatch.setattr("ondevice.machine.total_bytes", lambda root: 2_000_000)
    with caplog.at_level(logging.WARNING, "ondevice"):
        ondevice.pull(REPOSITORY)
    assert "weights have 0.0 GB and this machine has 0.0 GB of memory" in caplog.text


def test_another_bundle_of_that_name_is_kept_unless_told(hub, home, bundle):
    other = write_bundle(home / "toy", eos=(1,))
    with pytest.raises(UsageError, match="--replace"):
        ondevice.pull(REPOSITORY)
    assert Bundle.open(other).manifest.eos_token_ids == (1,)
    ondevice.pull(REPOSITORY, replace=True)
    assert Bundle.open("toy", verify_hashes=True).manifest == Bundle.open(bundle).manifest
    assert [path.name for path in home.iterdir()] == ["toy"]


@pytest.mark.parametrize("repository", ["toy", "a/b/c", "../a", "a/..", "https://x/y", "a/b?x", None, 5, b"a/b"])
def test_what_is_no_repository(hub, repository):
    with pytest.raises(UsageError):
        ondevice.pull(repository)
    assert hub.seen == []


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "", " ", 5, b"toy"])
def test_what_is_no_name(hub, name):
    with pytest.raises(UsageError):
        ondevice.pull(REPOSITORY, name=name)
    assert hub.seen == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_one_process_fetches_at_a_time(hub, home):
    with Destination("toy").lock(), pytest.raises(UsageError, match="another process"):
        ondevice.pull(REPOSITORY)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_a_process_that_ends_in_the_moment_of_the_lock_is_another_one(hub, home, monkeypatch):
    """Its directory has the final name by then, and the one of the first name would be nobody's."""

    def late(handle):
        (home / ".toy.fetching").rename(home / "toy")
        return lock(handle)

    monkeypatch.setattr(pulling, "lock", late)
    with pytest.raises(UsageError, match="another process"):
        ondevice.pull(REPOSITORY)
    assert [path.name for path in home.iterdir()] == ["toy"]


@pytest.mark.skipif(os.name == "nt", reason="has no SIGKILL")
def test_a_kill_loses_nothing(hub, home):
    reached: list[str] = []
    hub.on_request = reached.append
    hub.faults[WEIGHTS] = ["broken", *["503"] * 3]  # so that there is time
    command = [sys.executable, "-m", "ondevice", "pull", REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "export")])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while sum(path.endswith(WEIGHTS) for path in reached) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (home / "toy").exists()
    hub.faults.clear()
    hub.seen.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{home / 'toy'}\n"), done.stderr
    assert "ondevice chat toy" in done.stderr
    assert hub.asked(WEIGHTS)[0] is not None
    Bundle.open("toy", verify_hashes=True)
