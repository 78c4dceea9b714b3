"""Published model files for tests: skipped with a clear line offline, and a failure in continuous integration."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from models.published import NotFetchedError, fetch


@cache
def published(name: str) -> Path:
    """The path of a published file, as `models.published.fetch`; skips the test if it cannot be downloaded."""
    try:
        return fetch(name)
    except NotFetchedError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is not on this machine, and could not be downloaded: {error}")
