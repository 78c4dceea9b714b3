"""Training text: Python source of the interpreter's standard library, and chat pairs made from its functions."""

import ast
import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 3
LARGEST_FILE = 320_000  # bytes; what lies above is generated tables
TABLES = ("encodings/", "lib2to3/tests/data", "pydoc_data/", "site-packages/", "idlelib/idle_test/htest")


@dataclass(frozen=True)
class Module:
    """One source file of the standard library."""

    path: str  # relative to the library's root, with forward slashes
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the module is kept from training: a stable hash of its path, about 3 %."""
        return int(hashlib.sha256(self.path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT

    @property
    def is_test(self) -> bool:
        """Whether the module belongs to a test package (trained on once; the others twice)."""
        return any(part.startswith("test") or part.endswith("tests") for part in self.path.split("/")[:-1])


@dataclass(frozen=True)
class Chat:
    """One question and its answer, both plain text."""

    question: str
    answer: str


def read_modules() -> list[Module]:
    """All usable modules of the running interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith(TABLES) or not 200 < file.stat().st_size < LARGEST_FILE:
            continue
        text = decode(file.read_bytes())
        if text is not None and parse(text) is not None:
            modules.append(Module(path, text))
    return modules


def decode(data: bytes) -> str | None:
    """Source bytes as text by their own coding line; None when they are not valid."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding).replace("\r\n", "\n")
    except (SyntaxError, UnicodeDecodeError):
        return None


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None for the test suite's deliberately broken files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None


def chats(module: Module) -> Iterator[Chat]:
    """Pairs made from the functions of a module that have a docstring: write it, or complete it."""
    tree = parse(module.text)
    if tree is None:
        return
    lines = module.text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or len(node.body) < 2:
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
        code = dedent(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
        if not summary or not 3 <= len(code) <= 60:
            continue
        yield Chat(f"Write a Python function `{node.name}({ast.unparse(node.args)})`: {summary}", fence(code))
        docstring_end = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
        yield Chat(f"Complete this function:\n{fence(code[:docstring_end])}", fence(code))


def dedent(lines: list[str], columns: int) -> list[str]:
    """Lines without the function's own indentation."""
    return [line[columns:] if line[:columns].isspace() or not columns else line for line in lines]


def fence(code: list[str]) -> str:
    """A Markdown code block."""
    return "```python\n" + "\n".join(code) + "\n```"
