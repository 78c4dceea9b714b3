"""ARCHITECTURE.md's pictures are the folders and imports that there are, and no layer reaches over another."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PICTURES = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
GROUND = "ground"
"""The box that everything may import."""

TOKENS = ("decoding/", "drafters/", "engines/")
OUTSIDE = {
    "onnxruntime": ("engines/ort/",),
    "llvmlite": ("engines/simd/kernels/", "code_generator.py", "compiler_locks.py"),
    "numba": ("engines/simd/kernels/", "jit.py", "code_generator.py", "compiler_locks.py"),
    "tokenizers": ("text/",),
    "jinja2": ("text/",),
    "argparse": ("terminal/",),
    "llguidance": ("grammar/",),
    "tqdm": ("terminal/",),
    "matplotlib": ("terminal/bench/",),
    "ray": ("terminal/batch/",),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    **dict.fromkeys(("torch", "transformers", "optimum", "ondevice_export"), ()),
}
"""Packages, and the only parts of `ondevice` that import them."""

SEEN_BY_THE_TERMINAL = ("decoding/record.py", "drafters/registry.py")


class Import(NamedTuple):
    """Paths under `ondevice/` (the importing one of the exporter: from the repository's root), or another package."""

    importer: str
    imported: str


class Picture(NamedTuple):
    """Paths by box, and arrows between boxes."""

    boxes: dict[str, list[str]]
    arrows: set[tuple[str, str]]

    def box_of(self, path: str) -> str | None:
        """The box with the longest path that leads to this one."""
        found = [(len(place), box) for box, places in self.boxes.items() for place in places if path.startswith(place)]
        return max(found)[1] if found else None

    def drawn(self, imports: set[Import]) -> set[tuple[str, str]]:
        """The arrows that these imports are, but for those to the ground of the first picture."""
        pairs = {(self.box_of(each.importer), self.box_of(each.imported)) for each in imports}
        return {(a, b) for a, b in pairs if a is not None and b is not None and a != b}


def read_picture(text: str) -> Picture:
    boxes = {name: label.split(", ") for name, label in re.findall(r'(\w+)\["([^"]+)"\]', text)}
    arrows = set()
    for left, arrow, right in re.findall(r"^ *([\w &]+?) (<?-->) ([\w &]+)$", text, re.MULTILINE):
        for a in left.split(" & "):
            for b in right.split(" & "):
                arrows |= {(a, b), (b, a)} if arrow.startswith("<") else {(a, b)}
    return Picture(boxes, arrows)


def path_of(module: str) -> str:
    """The path under `ondevice/` of one of its modules; packages end in a slash."""
    inner = module.removeprefix("ondevice").removeprefix(".").replace(".", "/")
    return inner + (".py" if (ROOT / "ondevice" / f"{inner}.py").is_file() else "/")


def imported_by(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it; names that are modules themselves in full."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = Path(*node.module.split("."), alias.name)
                is_module = (ROOT / inner).is_dir() or (ROOT / inner.with_suffix(".py")).is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def read_imports() -> set[Import]:
    found = set()
    for root in (ROOT / "ondevice", ROOT / "export" / "ondevice_export"):
        for path in root.rglob("*.py"):
            importer = path.relative_to(ROOT).as_posix().removeprefix("ondevice/")
            for module in imported_by(path):
                ours = module.split(".")[0] == "ondevice"
                found.add(Import(importer, path_of(module) if ours else module.split(".")[0]))
    return found


IMPORTS = read_imports()
PUBLIC = "__init__.py"
"""`ondevice/__init__.py` names everything, and imports it only when asked."""


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "simd"])
def picture(request) -> Picture:
    return read_picture(PICTURES[request.param])


def test_every_box_is_there(picture):
    for place in (place for places in picture.boxes.values() for place in places):
        path = ROOT / place if place.startswith("export/") else ROOT / "ondevice" / place
        assert path.is_dir() if place.endswith("/") else path.is_file(), place


def test_every_file_is_in_a_box():
    whole = read_picture(PICTURES[1])
    files = [path.relative_to(ROOT / "ondevice").as_posix() for path in (ROOT / "ondevice").rglob("*.py")]
    assert [file for file in files if file != PUBLIC and whole.box_of(file) is None] == []


def test_the_arrows_are_the_imports(picture):
    imports = {each for each in IMPORTS if each.importer != PUBLIC}
    drawn = picture.drawn(imports)
    if picture.boxes[GROUND][0] == "bundle.py":
        drawn = {(a, b) for a, b in drawn if b != GROUND}
    assert drawn == picture.arrows


def test_the_first_picture_names_what_is_there():
    paths = re.findall(r"<br>([a-z_/]+(?:\.py|/))(?:, ([a-z_/]+\.py))?\"", PICTURES[0])
    assert len(paths) >= 8
    for path in filter(None, (each for pair in paths for each in pair)):
        assert (ROOT / "ondevice" / path).exists(), path


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def reaches(importers: tuple[str, ...], imported: tuple[str, ...]) -> list[Import]:
    return sorted(
        each for each in IMPORTS if each.importer.startswith(importers) and each.imported.startswith(imported)
    )


def test_tokens_know_no_text():
    assert (
        reaches(
            TOKENS,
            ("text/", "terminal/", "server/", "loading.py", "model.py", "generation.py", "options.py", "tokenizers"),
        )
        == []
    )


def test_text_knows_no_engine():
    assert (
        reaches(
            ("text/",),
            (*TOKENS, "terminal/", "server/", "loading.py", "model.py", "generation.py", "options.py", "numpy"),
        )
        == []
    )


def test_nothing_is_built_on_the_terminal():
    """But for the commands themselves."""
    commands = ("terminal/", "__main__", "export/ondevice_export/command.py")
    assert [each for each in reaches(("",), ("terminal/",)) if not each.importer.startswith(commands)] == []


def test_only_a_command_starts_the_server():
    others = [each for each in reaches(("",), ("server/",)) if not each.importer.startswith("server/")]
    assert {each.importer for each in others} == {"terminal/serve.py"}


def test_the_terminal_sees_plain_data_of_the_tokens():
    """But for `info`, which looks inside engines."""
    found = reaches(("terminal/",), TOKENS)
    assert {each.imported for each in found if not each.importer.startswith("terminal/info/")} <= set(
        SEEN_BY_THE_TERMINAL
    )


@pytest.mark.parametrize("package", OUTSIDE)
def test_packages_are_imported_where_they_belong(package):
    found = [each for each in IMPORTS if each.imported == package and not each.importer.startswith("export/")]
    assert [each for each in found if not each.importer.startswith(OUTSIDE[package])] == []
