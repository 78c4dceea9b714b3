"""What the wheel puts into other people's site-packages."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built here without a network: its build backend must be installed (it is with ondevice[test])."""
    build = pytest.importorskip("hatchling.build")
    directory = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with zipfile.ZipFile(directory / build.build_wheel(str(directory))) as archive:
            yield archive


def test_top_level_names(wheel):
    names = {name.split("/", maxsplit=1)[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {"ondevice", "ondevice_export", "optimum"}


def test_optimum_stays_a_namespace(wheel):
    """An `__init__.py` on this path would hide the optimum that is installed."""
    files = [name for name in wheel.namelist() if name.startswith("optimum/")]
    assert files
    assert all(name.startswith("optimum/commands/register/") for name in files)
    assert not any(name.endswith("__init__.py") for name in files)


def test_the_command_is_installed(wheel):
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "ondevice = ondevice.terminal.main:main" in wheel.read(entry_points).decode()


def test_every_module_is_in_it(wheel):
    names = set(wheel.namelist())
    for source in (ROOT, ROOT / "export"):
        for package in ("ondevice", "ondevice_export"):
            for file in (source / package).rglob("*.py"):
                assert file.relative_to(source).as_posix() in names


def test_no_generated_or_stray_files(wheel):
    for name in wheel.namelist():
        assert "__pycache__" not in name
        assert "/tests/" not in name
