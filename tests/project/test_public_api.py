"""The names that `import ondevice` offers, to a program, to a reader and to a type checker."""

import ast
import copy
import pickle
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ondevice
from ondevice import errors
from ondevice.engines.simd.tensor_files import UnsupportedGraphError


@pytest.mark.parametrize("name", ondevice.__all__)
def test_every_public_name_is_there(name):
    assert getattr(ondevice, name) is not None


def test_dir_and_completion_show_the_public_names():
    assert dir(ondevice) == sorted(ondevice.__all__)


def test_help_shows_the_public_names():
    text = pydoc.render_doc(
        ondevice,
        renderer=pydoc.plaintext,  # type: ignore[attr-defined]
    )
    assert "with ondevice.load(" in text
    assert "class Generation(" in text
    assert "stream(self, prompt" in text
    assert f"VERSION\n    {ondevice.__version__}" in text
    for name in set(ondevice.__all__) - {"__version__"}:
        assert name in text


def test_every_error_is_public():
    made_here = {
        name for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__
    }
    assert made_here <= set(ondevice.__all__)


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("no such option"),
        errors.ContextOverflowError(12, 8, counted=False),
        errors.BundleNotFoundError(Path("bundle")),
        errors.SessionFileError("chat.session", "it is cut"),
        errors.MissingDependencyError("ray", "ray", what="--ray"),
        UnsupportedGraphError("an operator"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_reaches_another_process_whole(error: errors.OndeviceError, copied: Callable[[object], object]):
    arrived = copied(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error) != ""
    assert vars(arrived) == vars(error)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'ondevice' has no attribute 'lode'"):
        ondevice.lode  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_what_is_imported_when_needed():
    tree = ast.parse(Path(ondevice.__file__).read_text("utf-8"))
    [choice] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in choice.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == ondevice._MODULE_OF  # type: ignore[attr-defined]


def test_importing_it_imports_nothing_heavy():
    code = "import ondevice, sys; dir(ondevice); assert not {'numpy', 'numba', 'onnxruntime'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
