"""A bundle made ready to run: what is decided for it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.bundle import Bundle
from ondevice.engines.simd import program
from ondevice.engines.simd.pack.layout import PAGE, PackLayout
from ondevice.engines.simd.plan.drafter import pack_drafter
from ondevice.engines.simd.program import load_program, read_models
from ondevice_export import export
from tests.conftest import REFERENCE


def test_all_threads_share_the_steps_of_a_large_drafter(
    reference_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts are the packed bytes of the drafter's own matrices."""
    bundle = Bundle.open(reference_bundle)
    _, drafter = read_models(bundle)
    assert drafter is not None
    alone = PackLayout()
    pack_drafter(alone, drafter)
    size = alone.size - PAGE
    assert size > 1 << 16
    for limit, shared in ((size, True), (size + 1, False)):
        monkeypatch.setattr(program, "SHARED_FROM", limit)
        assert load_program(bundle, most_rows=8, threads=2).drafter_shared == shared


def test_without_a_drafter_there_is_nothing_to_share(tmp_path: Path) -> None:
    bundle = Bundle.open(export(REFERENCE / "target", tmp_path / "bundle", drafter="none"))
    made = load_program(bundle, most_rows=8, threads=2)
    assert made.drafter is None
    assert not made.drafter_shared
