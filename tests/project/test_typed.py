"""Types of an installed wheel, as a type checker sees them in another project."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.project.test_contributing import DRAFTER

pytestmark = pytest.mark.needs("mypy")

PROGRAM = '''
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import ondevice


class Nobody:
    """A drafter of the application's own."""

    name = "nobody"

    def begin(self, prompt_ids: Sequence[int], session: ondevice.Session) -> None: ...

    def forget(self) -> None: ...

    def forecast(self, nodes: int) -> ondevice.Forecast:
        return ondevice.Forecast(np.zeros(0, np.float32), self.name)

    def draft(self, request: ondevice.DraftRequest) -> ondevice.Draft:
        return ondevice.Draft.empty()

    def observe(self, emitted: Sequence[int], outputs: ondevice.Outputs, path: Sequence[int]) -> None: ...


def only_even(logits: NDArray[np.float32], context: Sequence[int]) -> NDArray[np.float32]:
    logits[1::2] = -np.inf
    return logits


def settings(engine: ondevice.EngineName) -> ondevice.GenerationKeywords:
    return {"max_new_tokens": 8, "stop": ["."], "drafter": Nobody(), "logits_processors": [only_even]}


def answer(path: str) -> str:
    try:
        model = ondevice.load(path, engine="simd", threads=2, kv_cache="int8", on_prepare=lambda stage, share: None)
    except ondevice.BundleNotFoundError as error:
        return str(error)
    messages: Sequence[ondevice.Message] = [{"role": "user", "content": "Why is the sky blue?"}]
    with model, model.stream(messages, temperature=0.5, seed=1, drafter="ngram") as generation:
        reveal_type(generation)
        for step in generation:
            reveal_type(step)
            reveal_type(step.finish_reason)
            generation.cancel()
        reveal_type(generation.stats.tokens_per_round)
        reply = model.generate([2, 5, 7], **settings("auto"))
        reveal_type(reply)
        for call in model.generate(messages, tools=[{"type": "function"}], thinking=True).tool_calls:
            reveal_type(call.arguments)
        return reply.text
'''

REVEALED = [
    "ondevice.generation.Generation",
    "ondevice.generation.Step",
    "Literal['stop'] | Literal['length'] | Literal['context'] | Literal['cancelled'] | Literal['tool_calls'] | None",
    "float",
    "ondevice.generation.Reply",
    "dict[str, Any]",
]

MISTAKES = {
    "import ondevice\nondevice.lode('bundle')": "attr-defined",
    "import ondevice\nondevice.load('bundle').generate('x', max_tokens=8)": "call-arg",
    "import ondevice\nondevice.load('bundle').stream('x', temperature='hot')": "arg-type",
    "import ondevice\nondevice.load('bundle', engine='gpu')": "arg-type",
    "import ondevice\nondevice.load('bundle').generate('x', num_assistant_tokens_schedule='always')": "arg-type",
    "import ondevice\nondevice.load('bundle').stream('x', drafter=object())": "arg-type",
    "import ondevice\nondevice.GenerationOptions(stop=5)": "arg-type",
    "import ondevice\nfor step in ondevice.load('bundle').stream('x'):\n    print(step.tokens)": "attr-defined",
}
"""Programs of three lines at most, and the error that each must have."""


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and all that is installed here except this checkout."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=sys.platform != "win32")
    scripts, site = (Path(sysconfig.get_path(name, "venv", {"base": environment})) for name in ("scripts", "purelib"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The line of a .pth file adds a directory, but not what the .pth files in it name, such as this checkout.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return scripts / "python"


@pytest.fixture(scope="module")
def complaints(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of mypy by file: one run for all."""
    project = tmp_path_factory.mktemp("project")
    (project / "program.py").write_text(PROGRAM)
    (project / "contributing.py").write_text(
        f"{DRAFTER}\nimport ondevice\nchecked: ondevice.Drafter = BigramDrafter()\n"
    )
    for index, mistake in enumerate(MISTAKES):
        (project / f"mistake{index}.py").write_text(mistake)
    files = sorted(path.name for path in project.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", str(python)]
    ended = subprocess.run([*command, *files], cwd=project, capture_output=True, text=True, check=False)
    assert not ended.stderr, ended.stderr
    found: dict[str, list[str]] = {name: [] for name in files}
    for line in ended.stdout.splitlines()[:-1]:
        name, _, rest = line.partition(":")
        found[name].append(rest)
    return found


def test_a_program_has_no_errors_and_every_type_is_known(complaints):
    said = complaints["program.py"]
    assert not [line for line in said if "error:" in line]
    revealed = [re.search(r'Revealed type is "(.*)"', line) for line in said]
    assert [match[1].replace("builtins.", "") for match in revealed if match] == REVEALED


def test_the_drafter_of_the_contributing_page_is_one(complaints):
    assert complaints["contributing.py"] == []


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_a_mistake_is_an_error(complaints, index):
    said = [line for line in complaints[f"mistake{index}.py"] if "error:" in line]
    assert len(said) == 1
    assert f"[{list(MISTAKES.values())[index]}]" in said[0]
