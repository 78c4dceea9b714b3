"""The checks of a release find what is wrong with wheels and libraries of every platform."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ondevice import __version__
from ondevice.native.sets import PLATFORMS
from tests.conftest import ROOT
from tests.project import release

for name in ("elftools", "pefile", "macholib"):
    pytest.importorskip(name)
pytest.importorskip("ziglang")

SOURCE = """
#include <string.h>
#ifdef _WIN32
__declspec(dllexport)
#endif
long long NAME(char *a, char *b, long long n) { memcpy(a, b, n); return EXTRA; }
"""


@pytest.fixture(scope="session")
def linked(tmp_path_factory):
    """A function: platform -> bytes of a library of one small function, linked as the kernel libraries are."""
    directory = tmp_path_factory.mktemp("linked")

    def link(name, *, function=release.ENTRY, extra="0", target=None):
        source, out = directory / "small.c", directory / f"small{PLATFORMS[name].suffix}"
        source.write_text(SOURCE.replace("NAME", function).replace("EXTRA", extra), "utf-8")
        target = target or PLATFORMS[name].linked_as
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-shared", "-s", "-O2"]
        subprocess.run([*command, "-o", out.name, source.name], cwd=directory, check=True)
        return out.read_bytes()

    return link


def library_faults(linked, name, **options):
    return [*release.library_faults(linked(name, **options), name, PLATFORMS[name])]


EVERY_PLATFORM = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("windows") else name for name in PLATFORMS
]
"""Zig compiles its C library for Windows first, in 70 s for each processor."""


@pytest.mark.parametrize("name", EVERY_PLATFORM)
def test_a_library_of_each_platform_passes(linked, name):
    """Among the checks: the mac library is signed ad hoc and asks for macOS 11, as the wheel's tag says."""
    assert library_faults(linked, name) == []


@pytest.mark.parametrize("name", EVERY_PLATFORM)
def test_a_library_without_the_kernel_fails(linked, name):
    assert library_faults(linked, name, function="other") == ["it has no function ondevice_run"]


def test_a_library_for_a_newer_mac_fails(linked):
    assert library_faults(linked, "macos-aarch64", target="aarch64-macos.14.0") == ["it asks for macOS 14"]


def test_a_mac_library_without_signature_fails(linked, monkeypatch):
    monkeypatch.setattr(release, "AD_HOC", 0x100)
    assert library_faults(linked, "macos-aarch64") == ["it has no ad hoc signature"]


def test_a_library_of_another_machine_fails(linked):
    content = linked("linux-aarch64")
    faults = [*release.library_faults(content, "linux-x86_64", PLATFORMS["linux-x86_64"])]
    assert faults == ["it is for EM_AARCH64"]
    assert [*release.library_faults(content, "windows-x86_64", PLATFORMS["windows-x86_64"])] == ["it is no .dll"]


@pytest.mark.parametrize("name", ["linux-x86_64", "macos-aarch64"])
def test_a_function_that_is_not_everywhere_fails(linked, name):
    assert library_faults(linked, name, extra="(long long)strerror(1)") == ["it needs the function strerror"]


def test_a_library_for_a_cpu_without_multiply_add_may_call_libm(linked):
    content = linked("linux-x86_64", extra="(long long)__builtin_fmaf((float)n, 3.0f, 1.0f)")
    assert b"fmaf" in content
    assert b"libm.so.6" in content
    assert [*release.library_faults(content, "linux-x86_64", PLATFORMS["linux-x86_64"])] == []


@pytest.fixture
def made(tmp_path, linked):
    """A function that writes a wheel of a platform, with changes to its files."""

    def write(name, *, tag=None, changed=None, size=0):
        path = tmp_path / f"ondevice_runtime-{__version__}-py3-none-{tag or PLATFORMS[name].wheel}.whl"
        files = {}
        library = linked(name)
        for each in PLATFORMS[name].sets:
            about = {"version": __version__, "platform": name, "set": each}
            files[f"ondevice/native/libraries/{name}/{each}{PLATFORMS[name].suffix}"] = library
            files[f"ondevice/native/libraries/{name}/{each}.json"] = json.dumps(about).encode()
        files |= changed or {}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, content in files.items():
                if content is not None:
                    archive.writestr(file, content)
            archive.writestr("filler", bytes(size), zipfile.ZIP_STORED)
        return path

    return write


def test_a_complete_wheel_passes(made):
    assert [*release.wheel_faults(made("linux-aarch64"))] == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tag": "linux_x86_64"}, "has another version or tag"),
        ({"tag": "any"}, "the wheel for all systems has ondevice/native/libraries/linux-aarch64/neon.so"),
        ({"size": release.MAX_BYTES}, "more than 3,000,000"),
        ({"changed": {"ondevice/native/libraries/linux-aarch64/neon.so": None}}, "neon.so is missing"),
        ({"changed": {"ondevice/native/libraries/linux-aarch64/sve.so": b""}}, "sve.so is unknown"),
        (
            {
                "changed": {
                    "ondevice/native/libraries/linux-aarch64/neon.json": json.dumps(
                        {"version": __version__, "platform": "windows-x86_64", "set": "neon"}
                    ).encode()
                }
            },
            "another version, platform or instruction set",
        ),
    ],
)
def test_a_wrong_wheel_fails(made, options, fault):
    [first, *_] = release.wheel_faults(made("linux-aarch64", **options))
    assert fault in first


def test_the_wheel_for_all_systems_passes(wheel):
    assert [*release.wheel_faults(Path(wheel))] == []


def test_files_that_differ_when_built_again(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, content in ((first, b"1"), (second, b"2")):
        directory.mkdir()
        (directory / f"ondevice_runtime-{__version__}.tar.gz").write_bytes(content)
    (first / "notes.txt").write_text("")
    assert release.difference(first, second) == ["notes.txt", f"ondevice_runtime-{__version__}.tar.gz"]
    assert release.main(first, second) == 1
    said = capsys.readouterr().out
    assert "notes.txt is no file of a release" in said
    assert f"ondevice_runtime-{__version__}.tar.gz: built again, it is another file" in said


def test_the_workflow_builds_and_tests_every_platform():
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    [built] = [line for line in text.splitlines() if "platform: [all," in line]
    assert built.partition("[all, ")[2].removesuffix("]").split(", ") == list(PLATFORMS)
    for platform in PLATFORMS.values():
        assert f"tag: {platform.wheel}," in text
