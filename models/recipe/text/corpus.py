"""Training text: Python source of the running interpreter's standard library, and of packages."""

import ast
import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from text.packages import Package, find_wheel, source_files

HELD_OUT_PERCENT = 3
MIN_FILE, MAX_FILE = 200, 320_000  # bytes; larger files are generated tables
PACKAGE_BYTES = 8_000_000  # of one package at most, so that none dominates
COPIED_SHARE = 0.3  # a module is a copy if held-out modules contain more than this share of its longer lines
LONGER_LINE = 20  # characters: shorter lines occur in many files
TABLES = ("encodings/", "lib2to3/tests/data", "pydoc_data/", "site-packages/", "idlelib/idle_test/htest")


@dataclass(frozen=True)
class Module:
    """One source file of the standard library or of a package."""

    path: str  # relative to the library's or the wheel's root, with forward slashes
    text: str
    package: str = ""  # empty for the standard library

    @property
    def held_out(self) -> bool:
        """Whether the module is excluded from training: by a stable hash of its path, about 3 %."""
        return path_hash(self.path) % 100 < HELD_OUT_PERCENT

    @property
    def is_test(self) -> bool:
        """Whether the module belongs to a test package."""
        return any(part.startswith("test") or part.endswith("tests") for part in self.path.split("/")[:-1])


def path_hash(path: str) -> int:
    """A hash of a path that is the same on every machine."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16)


def read_library() -> list[Module]:
    """All usable modules of the running interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = ((file.relative_to(root).as_posix(), file) for file in sorted(root.rglob("*.py")))
    sources = ((path, file.read_bytes()) for path, file in files if not path.startswith(TABLES))
    return list(usable(sources))


def read_packages(packages: Iterable[Package], wheels: Path) -> list[Module]:
    """Usable modules of downloaded packages, at most PACKAGE_BYTES of each, chosen by the hash of their paths."""
    modules = []
    for package in packages:
        wheel = find_wheel(package, wheels)
        if wheel is None:
            raise FileNotFoundError(f"{wheels} has no wheel of {package.name} {package.version}")
        room = PACKAGE_BYTES
        for module in sorted(usable(source_files(wheel), package.name), key=lambda module: path_hash(module.path)):
            room -= len(module.text)
            if room >= 0:
                modules.append(module)
    return modules


def usable(sources: Iterable[tuple[str, bytes]], package: str = "") -> Iterator[Module]:
    """Modules of a suitable size that can be decoded and parsed."""
    for path, data in sources:
        if MIN_FILE < len(data) < MAX_FILE:
            text = decode(data)
            if text is not None and parse(text) is not None:
                yield Module(path, text, package)


def without_copies(modules: Iterable[Module], held_out: Iterable[Module]) -> list[Module]:
    """Modules without copies of each other or of a held-out one, such as a backport in a package."""
    secret = {line for module in held_out for line in longer_lines(module.text)}
    seen: set[str] = set()
    kept = []
    for module in modules:
        lines = longer_lines(module.text)
        copied = sum(line in secret for line in lines) > COPIED_SHARE * len(lines)
        if not copied and module.text not in seen:
            kept.append(module)
        seen.add(module.text)
    return kept


def longer_lines(text: str) -> list[str]:
    """Lines that are long enough to identify their source."""
    stripped = (line.strip() for line in text.split("\n"))
    return [line for line in stripped if len(line) >= LONGER_LINE]


def decode(data: bytes) -> str | None:
    """Source text, decoded by its own coding line; None if it is not valid."""
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
