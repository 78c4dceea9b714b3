"""Rows of keys and values in memory."""

from __future__ import annotations

import pytest

from ondevice.engines.protocol import KVCacheType
from ondevice.engines.simd.cache_rows import row_type


@pytest.mark.parametrize(("kind", "size"), [("fp16", 2 * 2 * 64), ("int8", 2 * (64 + 4))])
def test_a_row_holds_every_head(kind: KVCacheType, size: int) -> None:
    assert row_type(kind, 2, 64).itemsize == size
