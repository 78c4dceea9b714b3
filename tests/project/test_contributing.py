"""The examples of CONTRIBUTING.md work as they stand there."""

import importlib.util
import re
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import numpy as np
import pytest

from ondevice import Model
from ondevice.generate.drafters import registry
from ondevice.generate.drafters.registry import RegisteredDrafter
from tests.conftest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
DRAFTER, ENTRY, DRAFTER_TEST, _FAMILY, KERNEL, KERNEL_TEST = (
    dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
)
PROMPT = "import os\nimport re\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n"


def load(name: str, source: str, directory: Path) -> ModuleType:
    path = directory / f"{name.rpartition('.')[2]}.py"
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("ondevice.generate.drafters.bigram", DRAFTER, tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def run_tests(source: str, **names: object) -> None:
    """Run every test function of a block."""
    scope = dict(names)
    exec(compile(source, "CONTRIBUTING.md", "exec"), scope)
    tests = [each for name, each in scope.items() if name.startswith("test_") and callable(each)]
    assert tests
    for test in tests:
        test()


def test_the_test_of_the_drafter_passes(bigram: ModuleType) -> None:
    run_tests(DRAFTER_TEST)


def test_an_application_can_pass_the_drafter(bigram: ModuleType, reference_model: Model) -> None:
    plain = reference_model.generate(PROMPT, max_new_tokens=96, temperature=0.0, drafter="none")
    drafted = reference_model.generate(  # constant: whether drafts pay here is not the question
        PROMPT,
        max_new_tokens=96,
        temperature=0.0,
        drafter=bigram.BigramDrafter(),
        num_assistant_tokens_schedule="constant",
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.accepted > 0


def test_the_registry_offers_it_by_name(
    bigram: ModuleType, reference_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = eval(ENTRY, {"RegisteredDrafter": RegisteredDrafter, "BigramDrafter": bigram.BigramDrafter})
    monkeypatch.setitem(registry.REGISTRY, entry.name, entry)
    assert "bigram" in registry.names()
    plain = reference_model.generate(PROMPT, max_new_tokens=48, temperature=0.9, seed=3, drafter="none")
    drafted = reference_model.generate(PROMPT, max_new_tokens=48, temperature=0.9, seed=3, drafter="bigram")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafter == "bigram"


def test_the_kernel_passes_its_test(tmp_path: Path) -> None:
    run_tests(KERNEL_TEST, scale=load("scale", KERNEL, tmp_path).scale, np=np)


def test_files_that_it_names_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    paths = re.findall(r"`((?:tests|models|ondevice)/[\w/.]+)`", PAGE)
    missing = [path for path in {*links, *paths} if not (ROOT / path).exists()]
    assert sorted(missing) == ["ondevice/generate/drafters/bigram.py", "tests/drafters/test_bigram.py"]
