"""`python -m tests.project.mutation`: change one token of the package at a time, and see whether a test fails.

A mutant is a random edit of one token: another comparison, `+` for `-`, `and` for `or`, a constant off by one, a `not`
more or less, `None` in place of a returned value. Docstrings, other strings, annotations, decorators, `__all__` and
imports for type checkers are left as they are. Each mutant is made in a copy of the tree, and the test files that
import its module run against it, nearest by imports first, until a test fails.

mutmut 3 and cosmic-ray 8 were not used: neither chooses tests by module nor limits memory (a mutant of the sampling
took 22 GB), and mutmut leaves out decorated functions, which all kernels are.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from ondevice.native.library import SOURCES
from tests.conftest import ROOT
from tests.project.test_architecture import imported_by

PATHS = ("generate", "engines/*.py", "bundle_format", "text", "server")
"""Files and directories below `ondevice/` that are mutated unless others are named."""

DATA_BYTES = 4 << 30
"""Limit of the private writable memory of each process of the tests, in bytes."""

TESTS_S, STAGE_S = 120.0, 15.0
"""The tests of a mutant take at most TESTS_S seconds where nothing is mutated, and those of a process about STAGE_S."""

PATIENCE_S, SLOWDOWN, BUILDING_S = 90.0, 8.0, 240.0
"""Tests that take t seconds where nothing is mutated hang after PATIENCE_S + SLOWDOWN t, and BUILDING_S more if they
build kernels."""


# Mutants.

_SWAPS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
    "and": ("or",),
    "or": ("and",),
    "+": ("-",),
    "-": ("+",),
    "*": ("//",),
    "/": ("*",),
    "//": ("*",),
    "%": ("//",),
    "**": ("*",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "^": ("&",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "break": ("continue",),
    "continue": ("break",),
}
_SWAPS |= {f"{sign}=": (f"{_SWAPS[sign][0]}=",) for sign in ("+", "-", "*", "/", "//", "%", "<<", ">>", "&", "|", "^")}


class Site(NamedTuple):
    """A token that can be changed.

    start, end : offsets in the file's text
    options : what may take its place
    """

    start: int
    end: int
    options: tuple[str, ...]


class Mutant(NamedTuple):
    """A file of the package with one changed token.

    rank : a random number from 0 to 1, which depends on the seed, the path and the edit alone
    path : of the file, below the repository
    edit : the token, what takes its place, the text of the line, and which of several equal ones it is
    line : the number of the line, from 1
    text : the whole mutated file
    """

    rank: float
    path: str
    edit: str
    line: int
    text: str

    @property
    def key(self) -> str:
        return f"{self.path}: {self.edit}"


class Finder(ast.NodeVisitor):
    """Finds the sites of a file."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        kinds = (tokenize.OP, tokenize.NAME)
        tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type in kinds]
        self._tokens = [(self._starts[each.start[0] - 1] + each.start[1], each.string) for each in tokens]
        self.sites: list[Site] = []
        self.text = text
        self.visit(ast.parse(text))

    def _range(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """The offset in characters of a place that ast gives in bytes of UTF-8."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _swap(self, start: int, end: int) -> None:
        """Add the operator between two offsets, unless nothing takes its place."""
        found = [(at, token) for at, token in self._tokens if start <= at < end and token not in "()"]
        operator = " ".join(token for _, token in found)
        if operator in _SWAPS:
            at, token = found[-1]
            self.sites.append(Site(found[0][0], at + len(token), _SWAPS[operator]))

    def _condition(self, test: ast.expr) -> None:
        """Add the negation of a condition, unless the condition has an operator that is changed anyway."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            start, end = self._range(test)
            self.sites.append(Site(start, end, (f"not ({self.text[start:end]})",)))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """Leave out the `strict` of zip, a check that always holds."""
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out messages, and parts of them that Python 3.11 gives no places for."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets):
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == "Literal"):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if each is not None:
                self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        terms = [node.left, *node.comparators]
        for left, right in pairwise(terms):
            self._swap(self._range(left)[1], self._range(right)[0])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._swap(self._range(left)[1], self._range(right)[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_is_text(each) for each in (node.left, node.right)):
            self._swap(self._range(node.left)[1], self._range(node.right)[0])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._swap(self._range(node.target)[1], self._range(node.value)[0])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self._range(node)[0]
        if isinstance(node.op, ast.Not):
            self.sites.append(Site(start, start + len("not"), ("",)))
        elif isinstance(node.op, ast.USub):
            self.sites.append(Site(start, start + 1, ("+",)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "any", "all"):
            self._swap(*self._range(node.func))
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._swap(*self._range(node))

    def visit_Continue(self, node: ast.Continue) -> None:
        self._swap(*self._range(node))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.sites.append(Site(*self._range(node.value), ("None",)))
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            options: tuple[object, ...] = (not value,)
        elif isinstance(value, int):
            options = (value + 1, value - 1) if value else (1,)
        elif isinstance(value, float):
            options = (2 * value, 0.0) if value else (1.0,)
        else:
            return
        self.sites.append(Site(*self._range(node), tuple(map(str, options))))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutants(path: Path, seed: int) -> Iterator[Mutant]:
    """A mutant for each site of a file. Edits that are no Python are left out."""
    text, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    lines = text.splitlines()
    seen: Counter[str] = Counter()
    for site in sorted(Finder(text).sites):
        line = text.count("\n", 0, site.start) + 1
        old = " ".join(text[site.start : site.end].split())
        place = f"in: {lines[line - 1].strip()}"
        seen[old + place] += 1
        chance = random.Random(f"{seed} {name} {old} {place} {seen[old + place]}")
        rank, new = chance.random(), chance.choice(site.options)
        edit = f"{old} -> {new or 'nothing'} {place}" + (f" ({seen[old + place]})" if seen[old + place] > 1 else "")
        yield Mutant(rank, name, edit, line, text[: site.start] + new + text[site.end :])


def chosen(paths: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """The mutants of least rank in some files. An edit of the package leaves most of a choice as it was."""
    found = {path for words in paths for path in (ROOT / "ondevice").glob(words)}
    files = {each for path in found for each in ([path] if path.is_file() else path.rglob("*.py"))}
    ranked = sorted(mutant for file in files for mutant in mutants(file, seed))
    return list(islice(filter(_compiles, ranked), count))


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.text, mutant.path, "exec")
    except SyntaxError:
        return False
    return True


# Tests.


def distances(module: str) -> dict[str, int]:
    """All test files that import a module, with the length of the shortest chain of imports.

    A conftest.py is imported by the files in its directory and below.
    """
    importers = _importers()
    found, level = {module: 0}, [module]
    while level:
        level = [each for name in level for each in importers[name] if each not in found]
        found |= dict.fromkeys(level, max(found.values()) + 1)
        level = list(dict.fromkeys(level))
    files = _test_files()
    return {file: found[name] for file in files if (name := _module(Path(file))) in found}


def _test_files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def _importers() -> dict[str, set[str]]:
    """The importing modules of each module."""
    importers: dict[str, set[str]] = defaultdict(set)
    for root, below in ((ROOT, "ondevice"), (ROOT / "export", "ondevice_export"), (ROOT, "tests")):
        for path in (root / below).rglob("*.py"):
            name = _module(path.relative_to(root))
            for imported in imported_by(path):
                importers[imported].add(name)
            for parent in path.relative_to(ROOT).parents if below == "tests" else ():
                importers[".".join((*parent.parts, "conftest"))].add(name)
    return importers


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def stages(module: str, times: dict[str, float]) -> Iterator[tuple[list[str], float]]:
    """The test files of a module, divided into processes, with the seconds that each process takes unmutated: the
    nearest first, of these the one that is named after the module, then the fastest.
    """
    far = distances(module)
    stage: list[str] = []
    total = begun = 0.0
    own = f"test_{module.rpartition('.')[2]}.py"
    for file in sorted(far.keys() & times.keys(), key=lambda file: (far[file], not file.endswith(own), times[file])):
        if total + times[file] > TESTS_S and total:
            continue
        stage.append(file)
        total += times[file]
        if total - begun >= STAGE_S:
            yield stage, total - begun
            stage, begun = [], total
    if stage:
        yield stage, total - begun


# A copy of the tree, in which tests run.


class Tree:
    """A copy of the repository's files, with a cache directory of its own."""

    def __init__(self, room: Path) -> None:
        self.path, self._room, self._kernels = room / "tree", room, room / "kernels"
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.path / name)

        if self._start(sys.executable, "-c", _PREPARE, cache=self._kernels).wait():
            raise SystemExit(f"the kernels cannot be built:\n{(room / 'output').read_text('utf-8', 'replace')}")

    def times(self, files: Sequence[str]) -> dict[str, float | None]:
        """Seconds that each test file takes where nothing is mutated; None for those with a failing test."""
        report = self._room / "report.xml"
        workers = ("-n", "2", "--dist", "loadfile")
        said = self.run((*workers, "--junit-xml", str(report), "-o", "junit_family=xunit1", *files))
        if not report.exists():
            raise SystemExit(f"the tests do not run unmutated:\n{said}")
        times: dict[str, float | None] = dict.fromkeys(files, 0.0)
        for case in ElementTree.parse(report).iter("testcase"):
            file, spent = case.get("file", ""), times[case.get("file", "")]
            fails = case.find("failure") is not None or case.find("error") is not None
            times[file] = None if fails or spent is None else spent + float(case.get("time", 0))
        for file in files:
            if times[file] is None:
                print(f"{file} fails where nothing is mutated, and is left out", flush=True)
        return times

    def verdict(self, mutant: Mutant, times: dict[str, float]) -> str:
        """Run the tests of a mutant; returns the line that says which one noticed it, or "survived"."""
        path = self.path / mutant.path
        module = _module(Path(mutant.path))
        text = path.read_text("utf-8")
        self._replace(path, mutant.text)
        try:
            for files, spent in stages(module, times):
                limit = PATIENCE_S + SLOWDOWN * spent + (BUILDING_S if module in SOURCES else 0)
                if said := self.run(("-x", *files), limit):
                    return said
        finally:
            self._replace(path, text)
        return "survived"

    def run(self, words: Sequence[str], limit: float | None = None) -> str:
        """Run pytest: "" if all tests pass, else why not, in a line."""
        cache = self._room / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(self._kernels, cache)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
        process = self._start(*command, "--basetemp", str(self._room / "temporary"), *words, cache=cache)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"took more than {limit:.0f} s: {' '.join(words)}"
        finally:
            _kill(process)
        if code in (0, 5):  # 5: all tests are slow ones
            return ""
        lines = (self._room / "output").read_text("utf-8", "replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return [f"ended with {code}", *lines[-1:], *failed[-1:]][-1]

    def _start(self, *command: str, cache: Path) -> subprocess.Popen[bytes]:
        """Start a command in the tree, in a process group of its own, with its output in a file."""
        packages = (self.path, self.path / "export", self.path / "export" / "optimum")
        environment = {"PYTHONPATH": os.pathsep.join(map(str, packages)), "ONDEVICE_CACHE": str(cache)}
        with (self._room / "output").open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        return process

    def _replace(self, path: Path, text: str) -> None:
        """Write a file of the tree. Bytecode of the same second and size would count as that of the new text."""
        path.write_text(text, "utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


_PREPARE = """
from ondevice.native.sets import PARTS
from ondevice.preparation import Preparation
with Preparation() as preparation:
    preparation.compile(PARTS)
    preparation.finish()
"""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The command.


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.project.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=120, help="number of mutants (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--paths", nargs="+", default=PATHS, help="below ondevice/ (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="default: %(default)s")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = _read(args.out)
    sample = chosen(args.paths, args.count, args.seed)
    with tempfile.TemporaryDirectory(prefix="mutation") as room:
        tree = Tree(Path(room))
        kept = args.out.with_suffix(".times.json")
        measured = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
        if new := [file for file in _test_files() if file not in measured]:
            measured |= tree.times(new)
            kept.write_text(json.dumps(measured), "utf-8")
        times = {file: spent for file, spent in measured.items() if spent is not None}
        for mutant in sample:
            if mutant.key in done:
                continue
            started = time.monotonic()
            done[mutant.key] = tree.verdict(mutant, times)
            print(f"{time.monotonic() - started:5.0f} s  {mutant.key}\n         {done[mutant.key]}", flush=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mutant": mutant.key, "verdict": done[mutant.key]}) + "\n")
    survivors = [mutant for mutant in sample if done[mutant.key] == "survived"]
    for mutant in survivors:
        print(f"{mutant.path}:{mutant.line}: {mutant.edit}")
    print(f"seed {args.seed}: {len(sample)} mutants, {len(sample) - len(survivors)} noticed")
    return 1 if survivors else 0


def _read(file: Path) -> dict[str, str]:
    """Verdicts of an earlier run, by mutant."""
    if not file.exists():
        return {}
    entries = map(json.loads, file.read_text("utf-8").splitlines())
    return {entry["mutant"]: entry["verdict"] for entry in entries}


if __name__ == "__main__":
    sys.exit(main())
