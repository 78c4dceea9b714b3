"""The kernel library: what is refused, what is found again, and that nothing else is compiled or imported."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.errors import OndeviceError
from ondevice.generate.sampling.gumbel import IN_ORDER
from ondevice.generate.sampling.row_draw import argmax_row
from ondevice.native import building, functions, library
from ondevice.native.building import Build, build_now
from ondevice.native.functions import ENTRIES, Entry
from ondevice.native.sets import native_platform
from tests.conftest import ROOT

REPLY = """
import sys
import ondevice
with ondevice.load(sys.argv[1], threads=1) as model:
    model.generate("def is_prime(n):", max_new_tokens=20, top_k=20, top_p=0.9, seed=1)
print(*(name for name in ("numba", "llvmlite", "onnxruntime", "torch") if name in sys.modules))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that a test may edit."""
    source = Path(ondevice.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "copy/ondevice", ignore=shutil.ignore_patterns("__pycache__")))


def stamp_of(package: Path) -> str:
    """The stamp of a copy of the package, in a process that has it instead of this one."""
    code = "from ondevice.native.library import stamp; print(stamp())"
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command, directory = [sys.executable, "-c", code], package.parent
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=directory)
    return ended.stdout.strip()


@pytest.mark.parametrize(
    "file",
    [
        "bundle_format/weight_format.py",
        "engines/simd/kernels/isa/vector.py",
        "generate/sampling/gumbel.py",
        "native/builder.py",
    ],
)
def test_an_edited_source_asks_for_another_library(copy: Path, file: str) -> None:
    before = stamp_of(copy)
    assert stamp_of(copy) == before
    with (copy / file).open("a") as source:
        source.write("\n# edited\n")
    assert stamp_of(copy) != before


def test_every_kernel_is_in_a_source() -> None:
    """A library would otherwise be taken after its kernel was edited."""
    places = {package: Path(str(package.__file__)).parent for package in (ondevice, import_module("ondevice_export"))}
    found = {
        ".".join((package.__name__, *file.relative_to(place).with_suffix("").parts))
        for package, place in places.items()
        for file in place.rglob("*.py")
        if {"kernel", "entry"} & _decorators(file)
    }
    assert "ondevice.generate.drafters.ngram" in found
    assert not found - library.sources().keys()


def _decorators(file: Path) -> set[str]:
    """Names of the decorators, or of the functions that make them, in a file."""
    made = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    return {node.id for node in made if isinstance(node, ast.Name)}


def test_a_reply_imports_no_compiler(reference_bundle: Path) -> None:
    command = [sys.executable, "-c", REPLY, str(reference_bundle)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout.strip(), ended.stderr) == ("", "")


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a library whose description has other values for some fields."""

    def write(**changed: Any) -> Path:
        file = tmp_path / "made.so"
        library.write(file, b"code", library.choice().set, native_platform())
        about = file.with_suffix(".json")
        about.write_text(json.dumps(json.loads(about.read_text("utf-8")) | changed), "utf-8")
        return file

    return write


WRONG = {
    "sources": ({}, "other sources"),
    "version": ("0.0.0", "other sources"),
    "platform": ("plan9-mips", "they are for plan9-mips"),
    "set": ("neon-of-tomorrow", "this CPU lacks neon-of-tomorrow"),
    "sha256": ("0" * 64, "damaged"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_library_of_something_else_is_not_loaded(
    made: Callable[..., Path], field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value, reason = WRONG[field]
    file = made(**{field: value})
    monkeypatch.setenv(library.CHOICE, str(file))
    assert library.choice.__wrapped__().file != file
    assert reason in caplog.text


def test_a_set_whose_name_is_no_text_is_not_loaded(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = made(set=["avx2"])
    monkeypatch.setenv(library.CHOICE, str(file))
    assert library.choice.__wrapped__().file != file
    assert "this CPU lacks ['avx2']" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version": 1'])
def test_a_damaged_description_is_not_believed(
    made: Callable[..., Path], content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = made()
    file.with_suffix(".json").write_bytes(content)
    monkeypatch.setenv(library.CHOICE, str(file))
    assert library.choice.__wrapped__().file != file
    assert "made.json is damaged" in caplog.text


def test_a_file_that_is_no_library_is_not_loaded(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = made()
    monkeypatch.setenv(library.CHOICE, str(file))
    assert library.choice.__wrapped__().file != file
    assert f"not using the kernels in {file}" in caplog.text


def test_a_damaged_file_is_built_again(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.choice().file is not None:
        pytest.skip("a shared library is used")
    shutil.copytree(library.code_directory(), tmp_path / library.code_directory().name)
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    tokens, forward = "tokens", "forward"
    assert library.missing([tokens, forward]) == []
    library.cached(tokens).write_bytes(b"half a block")
    assert library.missing([tokens, forward]) == [tokens]


def test_kernels_are_built_from_this_package_wherever_the_program_runs(
    kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `ondevice` in the current directory may be another version's, or another user's."""
    if library.choice().file is not None:
        pytest.skip("a shared library is used")
    for name in ("ondevice", "numba"):
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    build_now("roofline")
    assert library.missing(["roofline"]) == []


def test_a_library_may_have_more_than_is_installed_here(made: Callable[..., Path]) -> None:
    """Such as the exporter's kernels."""
    assert library._check(made(sources={**library.sources(), "ondevice_elsewhere.kernels": "0"}))["sha256"]


@pytest.mark.parametrize("name", ["library.pyc", "absent.py"])
def test_an_application_without_sources_loads_what_it_brings(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = made(sources=dict.fromkeys(library.sources(), "0"))
    with pytest.raises(ValueError, match="other sources"):
        library._check(file)
    monkeypatch.setattr(library, "__file__", str(file.with_name(name)))
    assert library._check(file)["sha256"]


def test_arrays_of_another_kind_are_refused(kernels: None) -> None:
    scores, tokens, values = np.zeros(8, np.float32), np.zeros(2, np.intp), np.zeros(2)
    assert argmax_row(scores, IN_ORDER, tokens, values) == 2
    wrongs: list[Any] = [scores.astype(np.float64), scores.reshape(2, 4), np.zeros(16, np.float32)[::2]]
    for wrong in wrongs:
        with pytest.raises(TypeError):
            argmax_row(wrong, IN_ORDER, tokens, values)
    with pytest.raises(ValueError, match="argument"):
        argmax_row(scores)  # type: ignore[call-arg]


def test_empty_and_read_only_arrays_have_addresses(kernels: None) -> None:
    scores = np.arange(4, dtype=np.float32)
    scores.setflags(write=False)
    tokens, values = np.zeros(4, np.intp), np.zeros(4)
    assert argmax_row(scores, IN_ORDER, tokens, values) == 4
    assert tokens.tolist() == [3, 2, 1, 0]
    assert argmax_row(scores[:0], IN_ORDER, tokens[:0], values[:0]) == 0


def test_every_entry_has_its_function() -> None:
    for name in pytest.importorskip("ondevice.native.builder").MODULES:
        import_module(name)
    assert len(ENTRIES) > 15
    for entry in ENTRIES.values():
        assert isinstance(entry, Entry)
        assert entry.kernel.py_func.__code__.co_argcount == len(entry.parameters), entry.name


def test_loading_dates_the_directory(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that were not used for two weeks are removed, so that of other tests must not get an old date."""
    if library.choice().file is not None:
        pytest.skip("a shared library is used")
    shutil.copytree(library.code_directory(), tmp_path / library.code_directory().name)
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path))
    os.utime(library.code_directory(), (0, 0))
    functions._loaded.__wrapped__("tokens")
    assert library.code_directory().stat().st_mtime > 0


FULL_DISK = """
import resource
from ondevice.native import library
from ondevice.native.building import build_now
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
build_now("roofline")
assert library.missing(["roofline"]) == []
"""
"""A process that can write no byte to any file, temporary ones included."""


@pytest.mark.needs("numba")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_kernels_are_built_on_a_full_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "ONDEVICE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FULL_DISK]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    if library.choice().file is None:
        assert "could not be written to" in ended.stderr


@pytest.mark.needs("numba")
def test_a_file_that_vanishes_behind_its_check_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may clear the cache at any time."""
    monkeypatch.setattr(library, "choice", lambda: library.LibraryChoice("x86-64-v3", None))
    monkeypatch.setattr(library, "kept", lambda part: tmp_path / f"{part}.block")
    assert library.find("packing") is None


REMOVED_DIRECTORY = """
import os
from ondevice.native import library
from ondevice.native.building import build_now
os.rmdir(os.getcwd())
build_now("roofline")
assert library.missing(["roofline"]) == []
"""


@pytest.mark.needs("numba")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no current directory")
def test_kernels_are_built_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    tmp_path.joinpath("here").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ONDEVICE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", REMOVED_DIRECTORY]
    here = tmp_path / "here"
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=here)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.needs("numba")
def test_a_builder_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = "import sys; sys.stderr.write('first\\nthe last line\\n\\n'); sys.exit(3)"
    monkeypatch.setattr(building, "_command", lambda: [sys.executable, "-c", complaint])
    with pytest.raises(OndeviceError, match=r"could not be built: the last line$"), Build("tokens") as build:
        build.wait()
