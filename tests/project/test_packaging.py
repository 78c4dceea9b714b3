"""The files that the wheel puts into other people's site-packages."""

import email
import zipfile

import pytest
from packaging.requirements import Requirement

import ondevice
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def test_top_level_names(archive):
    names = {name.split("/", maxsplit=1)[0] for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {"ondevice", "ondevice_export"}


def test_metadata(archive):
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    told = email.message_from_bytes(archive.read(name))
    assert (told["Name"], told["Version"]) == ("ondevice-runtime", ondevice.__version__)
    assert told["Author"] == "The ondevice developers"
    assert {url.partition(",")[0] for url in told.get_all("Project-URL", [])} == {
        "Homepage",
        "Source",
        "Issues",
        "Changelog",
    }
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert "Typing :: Typed" in told.get_all("Classifier", [])


def environment(system, machine, python):
    """As pip sees it."""
    return {"sys_platform": system, "platform_machine": machine, "python_version": python, "extra": ""}


@pytest.mark.parametrize(
    ("where", "numba", "onnxruntime"),
    [
        (environment("linux", "x86_64", "3.11"), ">=0.66", True),
        (environment("linux", "aarch64", "3.14"), ">=0.66", True),
        (environment("win32", "AMD64", "3.13"), ">=0.66", True),
        (environment("darwin", "arm64", "3.12"), ">=0.66", True),
        (environment("darwin", "x86_64", "3.12"), ">=0.62", False),
        (environment("linux", "x86_64", "3.15"), ">=0.66", False),
    ],
)
def test_what_is_installed_where(archive, where, numba, onnxruntime):
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    wanted = [each for each in map(Requirement, lines) if not each.marker or each.marker.evaluate(where)]
    found = {each.name: str(each.specifier) for each in wanted}
    assert len(found) == len(wanted)
    assert found["numba"] == numba
    assert ("onnxruntime" in found) == onnxruntime
    assert set(found) - {"onnxruntime"} == {
        "numpy",
        "numba",
        "tokenizers",
        "jinja2",
        "tqdm",
        "argcomplete",
        "huggingface-hub",
    }


def test_the_command_is_installed(archive):
    [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "ondevice = ondevice.cli.main:main" in archive.read(entry_points).decode()


def test_every_module_is_in_it(archive):
    names = set(archive.namelist())
    for source in (ROOT, ROOT / "export"):
        for package in ("ondevice", "ondevice_export"):
            for file in (source / package).rglob("*.py"):
                assert file.relative_to(source).as_posix() in names
            assert f"{package}/py.typed" in names


def test_the_page_of_the_server_is_in_it(archive):
    page = {name for name in archive.namelist() if name.startswith("ondevice/server/page/")}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ondevice/server/page").rglob("*") if path.is_file()}
    assert page == there
    assert {
        f"ondevice/server/page/vendor/{name}.LICENSE" for name in ("highlight", "marked", "noto-sans-math", "temml")
    } <= page


def test_no_generated_or_stray_files(archive):
    for name in archive.namelist():
        assert "__pycache__" not in name
        assert "/tests/" not in name
