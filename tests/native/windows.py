"""Makes this process look like one on Windows."""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig

import pytest


def pretend_windows(monkeypatch: pytest.MonkeyPatch, kernel: object, process: str = "win-amd64") -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: process)
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")  # the machine's own, if it emulates x86-64
    monkeypatch.setattr(ctypes, "CDLL", {"kernel32": kernel}.__getitem__)
