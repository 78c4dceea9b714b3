"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """The installed version, or `missing`: onnxruntime has no wheels for Intel Macs and the newest Python."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
