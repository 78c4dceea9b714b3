"""Rotary frequencies, beside arithmetic of 40 digits."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest

from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.rope import rotary


@pytest.mark.parametrize(("theta", "rotated", "factor"), [(10_000.0, 1.0, 1.0), (1_000_000.0, 0.25, 8.0)])
def test_each_frequency_is_the_nearest_float32(theta: float, rotated: float, factor: float) -> None:
    head_dim = 512
    fields = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated, "factor": factor}
    found = rotary(JsonFields(fields, "config.json"), head_dim, 4096).frequencies
    pairs = int(rotated * head_dim) // 2
    with localcontext(prec=40):
        exact = [1 / Decimal(theta) ** (Decimal(2 * i) / head_dim) / Decimal(factor) for i in range(pairs)]
    np.testing.assert_array_equal(found[:pairs], np.array([float(value) for value in exact], np.float32))
    assert not found[pairs:].any()
