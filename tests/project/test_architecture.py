"""ARCHITECTURE.md: its pictures equal the imports, its four ways name existing files, and no layer skips another."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
PICTURES = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
LAYERS, SIMD = PICTURES
GROUND = "ground"
"""The box that everything may import."""

WAYS = {"generation": 8, "weight": 8, "matrix product": 9, "request": 8}
"""The ways -> the most files that a reader opens who follows one."""

TOKENS = ("generate/", "engines/")
OUTSIDE = {
    "onnxruntime": ("engines/ort.py",),
    "llvmlite": ("engines/simd/kernels/", "native/"),
    "numba": ("engines/simd/kernels/", "native/"),
    "tokenizers": ("text/",),
    "jinja2": ("text/",),
    "PIL": ("media/images.py",),
    "argparse": ("cli/", "native/builder.py", "native/shipping.py"),
    "argcomplete": ("cli/completion.py",),
    "llguidance": ("grammar/",),
    "huggingface_hub": ("hub.py",),
    "tqdm": ("cli/",),
    "matplotlib": ("cli/bench/",),
    "ray": ("cli/batch/",),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    **dict.fromkeys(("torch", "transformers", "optimum", "ondevice_export"), ()),
}
"""Packages, and the only parts of `ondevice` that import them."""

SEEN_BY_THE_COMMAND_LINE = ("generate/stats.py", "generate/drafters/registry.py", "generate/drafters/simulated.py")


class Import(NamedTuple):
    """Paths under `ondevice/`; for the exporter's files from the repository's root; or the name of another package."""

    importer: str
    imported: str


class Picture(NamedTuple):
    """The paths of each box, and the arrows between boxes."""

    boxes: dict[str, list[str]]
    arrows: set[tuple[str, str]]

    def box_of(self, path: str) -> str | None:
        """The box with the longest path that this one begins with."""
        found = [(len(place), box) for box, places in self.boxes.items() for place in places if path.startswith(place)]
        return max(found)[1] if found else None

    def drawn(self, imports: set[Import]) -> set[tuple[str, str]]:
        """The arrows between different boxes that these imports amount to."""
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
    """Path of a module of `ondevice`, below it; packages end in a slash."""
    inner = module.removeprefix("ondevice").removeprefix(".").replace(".", "/")
    return inner + (".py" if (ROOT / "ondevice" / f"{inner}.py").is_file() else "/")


def imported_by(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = Path(*node.module.split("."), alias.name)
                is_module = (ROOT / inner).is_dir() or (ROOT / inner.with_suffix(".py")).is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@cache
def all_imports() -> set[Import]:
    found = set()
    for root in (ROOT / "ondevice", ROOT / "export" / "ondevice_export"):
        for path in root.rglob("*.py"):
            importer = path.relative_to(ROOT).as_posix().removeprefix("ondevice/")
            for module in imported_by(path):
                ours = module.split(".")[0] == "ondevice"
                found.add(Import(importer, path_of(module) if ours else module.split(".")[0]))
    return found


PUBLIC = "__init__.py"
"""`ondevice/__init__.py` names everything, and imports a name only when it is used."""


@pytest.fixture(scope="module", params=[LAYERS, SIMD], ids=["layers", "simd"])
def picture(request) -> Picture:
    return read_picture(request.param)


def test_no_files_import_each_other_in_a_circle():
    """Not inside functions either: a reader can follow imports downwards."""
    imports: dict[str, set[str]] = {}
    for each in all_imports():
        if PUBLIC not in (each.importer, each.imported.rpartition("/")[2]) and each.imported.endswith(".py"):
            imports.setdefault(each.importer, set()).add(each.imported)
    while grounds := {path for path in imports if not imports[path] & imports.keys()}:
        imports = {path: found for path, found in imports.items() if path not in grounds}
    assert not imports


def test_every_box_is_there(picture):
    for place in (place for places in picture.boxes.values() for place in places):
        path = ROOT / place if place.startswith("export/") else ROOT / "ondevice" / place
        assert path.is_dir() if place.endswith("/") else path.is_file(), place


def test_every_file_is_in_a_box():
    layers = read_picture(LAYERS)
    files = [path.relative_to(ROOT / "ondevice").as_posix() for path in (ROOT / "ondevice").rglob("*.py")]
    assert [file for file in files if file != PUBLIC and layers.box_of(file) is None] == []


def test_the_arrows_are_the_imports(picture):
    imports = {each for each in all_imports() if each.importer != PUBLIC}
    drawn = picture.drawn(imports)
    if picture.boxes[GROUND][0] == "bundle.py":
        drawn = {(a, b) for a, b in drawn if b != GROUND}
    assert drawn == picture.arrows


@pytest.mark.parametrize("way", WAYS)
def test_a_way_names_few_files_by_their_paths(way):
    section = re.search(rf"^## The way of a {way}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    links = re.findall(r"\[([^]]+)\]\(([^)#]+)\)", section[1])
    assert 5 <= len({path for _, path in links}) <= WAYS[way]
    for name, path in links:
        assert path.endswith(f"/{name}"), (name, path)
        assert (ROOT / path).is_file(), path


def test_it_is_one_page():
    assert len(PAGE.splitlines()) <= 170


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def reaches(importers: tuple[str, ...], imported: tuple[str, ...]) -> list[Import]:
    return sorted(
        each for each in all_imports() if each.importer.startswith(importers) and each.imported.startswith(imported)
    )


def public_types(path: Path) -> Iterator[str]:
    """Names of the classes of a file, and of the types that it gives a name, such as `Origin = Literal[...]`."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            is_variable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
            name = "" if is_variable else node.targets[0].id
        else:
            continue
        if name[:1].isupper() and not name.isupper():
            yield name


@pytest.mark.parametrize(
    ("roots", "least"), [(("ondevice", "export"), 500), (("models/recipe",), 30), (("benchmarks",), 50)]
)
def test_no_two_types_have_one_name(roots: tuple[str, ...], least: int):
    owners: dict[str, list[str]] = {}
    for root in roots:
        for path in (ROOT / root).rglob("*.py"):
            for name in public_types(path):
                owners.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert len(owners) > least
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_tokens_know_no_text():
    assert (
        reaches(
            TOKENS,
            ("text/", "cli/", "server/", "model.py", "generation.py", "options.py", "tokenizers"),
        )
        == []
    )


def test_text_knows_no_engine():
    assert (
        reaches(
            ("text/",),
            (*TOKENS, "cli/", "server/", "model.py", "generation.py", "options.py", "numpy"),
        )
        == []
    )


def test_the_engine_sees_only_the_contract_of_the_kernels():
    kernels = "engines/simd/kernels/"
    found = {each.imported for each in reaches(("",), (kernels,)) if not each.importer.startswith(kernels)}
    assert {str(Path(each).parent) for each in found} == {kernels + "contract"}


def test_nothing_is_built_on_the_command_line():
    """Except the commands themselves."""
    commands = ("cli/", "__main__", "export/ondevice_export/command.py")
    assert [each for each in reaches(("",), ("cli/",)) if not each.importer.startswith(commands)] == []


def test_only_a_command_starts_the_server():
    others = [each for each in reaches(("",), ("server/",)) if not each.importer.startswith("server/")]
    assert {each.importer for each in others} == {"cli/serve.py"}


def test_the_command_line_sees_plain_data_of_the_tokens():
    """Except `info`, which reports on engines."""
    found = reaches(("cli/",), TOKENS)
    assert {each.imported for each in found if not each.importer.startswith("cli/info.py")} <= set(
        SEEN_BY_THE_COMMAND_LINE
    )


@pytest.mark.parametrize("package", OUTSIDE)
def test_packages_are_imported_where_they_belong(package):
    found = [each for each in all_imports() if each.imported == package and not each.importer.startswith("export/")]
    assert [each for each in found if not each.importer.startswith(OUTSIDE[package])] == []


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file: of the module, its classes and functions, and the strings after its names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.strip()


def test_docstrings_begin_with_their_subject():
    """A sentence that begins with one of these words is a riddle for a reader who does not know the answer."""
    riddles = {
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for folder in ("ondevice", "export", "tests", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
        for text in docstrings(path)
        if re.match(r"(What|Those|That|Of|Who|Whose|Nobody)\b", text)
    }
    assert riddles == set()
