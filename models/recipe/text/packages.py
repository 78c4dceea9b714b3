"""Packages from the Python package index on which the pair is trained, in addition to the standard library."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A release with a permissive licence, by its SPDX identifier; its wheel is Python source for any platform."""

    name: str
    version: str
    licence: str


PACKAGES = (
    Package("bokeh", "3.9.2", "BSD-3-Clause"),
    Package("celery", "5.7.0", "BSD-3-Clause"),
    Package("dask", "2026.8.0", "BSD-3-Clause"),
    Package("distributed", "2026.8.0", "BSD-3-Clause"),
    Package("Django", "5.2.19", "BSD-3-Clause"),
    Package("fonttools", "4.68.0", "MIT"),
    Package("ipython", "9.18.1", "BSD-3-Clause"),
    Package("jax", "0.10.2", "Apache-2.0"),
    Package("keras", "3.15.1", "Apache-2.0"),
    Package("mypy", "2.4.1", "MIT"),
    Package("networkx", "3.6.1", "BSD-3-Clause"),
    Package("nltk", "3.10.4", "Apache-2.0"),
    Package("pytest", "9.2.0", "MIT"),
    Package("robotframework", "7.5", "Apache-2.0"),
    Package("SCons", "4.11.1", "MIT"),
    Package("Scrapy", "2.19.0", "BSD-3-Clause"),
    Package("setuptools", "84.2.1", "MIT"),
    Package("Sphinx", "9.0.4", "BSD-2-Clause"),
    Package("SQLAlchemy", "2.1.9", "MIT"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("textual", "8.2.8", "MIT"),
    Package("trio", "0.35.0", "MIT OR Apache-2.0"),
    Package("Twisted", "26.10.0", "MIT"),
    Package("wagtail", "8.0.1", "BSD-3-Clause"),
    Package("xarray", "2026.9.0", "Apache-2.0"),
)


def download(packages: tuple[Package, ...], directory: Path) -> None:
    """Download the wheels that `directory` lacks; pip runs none of their code."""
    missing = [f"{package.name}=={package.version}" for package in packages if not find_wheel(package, directory)]
    if missing:
        options = ["--no-deps", "--only-binary=:all:", "--platform=any", "--python-version=3.11"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, "-d", directory, *missing], check=True)


def find_wheel(package: Package, directory: Path) -> Path | None:
    """The wheel of a package in `directory`; wheels are named in lower or mixed case."""
    start = f"{package.name}-{package.version}-".lower()
    return next((file for file in sorted(directory.glob("*.whl")) if file.name.lower().startswith(start)), None)


def source_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of every Python file in a wheel, sorted by path."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py"):
                yield name, archive.read(name)
