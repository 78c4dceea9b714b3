import math
import sys
from decimal import Context, Decimal, localcontext

import numpy as np
import pytest

from ondevice.generate.sampling.elementary import exponential, exponential_32, fraction_and_exponent, logarithm
from ondevice.generate.sampling.filters import mass_of, weigh

NORMAL = -708.3964185322641
"""The argument of the smallest exponential that is not denormal."""

PINNED = {
    1.0: "0x1.5bf0a8b145769p+1",
    -0.6: "0x1.18fdd6b9604e4p-1",
    -17.64635254309259: "0x1.74a78a5b787ffp-26",
    -740.0: "0x0.0000000000055p-1022",
}


def errors(arguments: np.ndarray) -> list[float]:
    """The errors of exponentials in units of their last place."""
    found = []
    with localcontext(Context(prec=40, Emin=-9999, Emax=9999)):
        for x in arguments.tolist():
            exact = Decimal(x).exp()
            found.append(float(abs(Decimal(exponential(x)) - exact) / Decimal(math.ulp(float(exact)))))
    return found


@pytest.mark.parametrize(("low", "high"), [(-0.35, 0.35), (-3.0, 1.0), (-40.0, 0.0), (NORMAL, 709.78)])
def test_exponentials_are_within_0_7_units(low: float, high: float) -> None:
    assert max(errors(np.random.default_rng(1).uniform(low, high, 5000))) < 0.7


def test_exponentials_are_within_0_7_units_where_the_exponent_changes() -> None:
    edges = (np.arange(-1021, 1023) + 0.5) * math.log(2.0)
    assert max(errors(np.concatenate([edges, np.nextafter(edges, -np.inf), np.nextafter(edges, np.inf)]))) < 0.7


def test_denormal_exponentials_are_within_a_unit() -> None:
    assert max(errors(np.random.default_rng(2).uniform(-745.2, NORMAL, 5000))) < 1.0


def test_exponentials_end_in_0_and_infinity() -> None:
    nearest = {0.0: 1.0, 5e-324: 1.0, -1e-300: 1.0}
    large = {709.7827128933841: math.inf, 710.5: math.inf, 1e308: math.inf, math.inf: math.inf}
    small = {-745.1332191019411: 5e-324, -745.1332191019412: 0.0, -1e308: 0.0, -math.inf: 0.0}
    for x, expected in {**nearest, **large, **small}.items():
        assert exponential(x) == expected, x
    assert 1.797e308 < exponential(709.782712893384) < math.inf
    assert math.isnan(exponential(math.nan))


def test_exponentials_are_what_they_always_were() -> None:
    """On every CPU: texts of a seed depend on them."""
    assert {x: exponential(x).hex() for x in PINNED} == PINNED


def test_compiled_code_rounds_as_python_does() -> None:
    """Nothing was contracted or reordered: so it is the same on other CPUs."""
    random = np.random.default_rng(0)
    for x in random.random(2000).tolist():
        assert logarithm(x) == logarithm.py_func(x)  # type: ignore[attr-defined]
    for x in random.uniform(-746.0, 709.0, 2000).tolist():
        assert exponential(x) == exponential.py_func(x)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 7, 8, 31, 500])
def test_a_row_of_weights_has_the_bits_of_single_ones(size: int) -> None:
    """A vectorised loop and its rest compute the same."""
    scores = np.random.default_rng(size).normal(-300.0, 200.0, size).astype(np.float32)
    scores[size // 2] = -np.inf
    weights = np.empty(size)
    weigh(scores, 3.5, 0.7, weights)
    assert weights.tolist() == [exponential((score - 3.5) / 0.7) for score in scores.tolist()]


def test_the_exponential_of_a_float32() -> None:
    scores = np.concatenate([np.linspace(-87.0, 0.0, 5000), [-1e-30, -0.0]]).astype(np.float32)
    found = np.array([exponential_32(x) for x in scores])
    exact = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    near = scores > -1.0
    np.testing.assert_allclose(found[near], exact[near], rtol=3e-7)
    least = exponential_32(np.float32(-87.0))
    assert [exponential_32(np.float32(x)) for x in (-88.0, -3e38, -np.inf)] == [least] * 3
    assert [exponential_32.py_func(x) for x in scores] == found.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 2, 3, 65, 1000, 49_152])
@pytest.mark.parametrize("temperature", [1e-310, 0.2, 1.0, 1e30])
def test_the_mass_of_a_row_is_right_to_a_millionth(size: int, temperature: float) -> None:
    scores = np.random.default_rng(size).normal(-5.0, 4.0, size).astype(np.float32)
    scores[size // 2 :: 7] = -np.inf
    scores[0] = peak = 12.5
    with np.errstate(over="ignore"):
        exact = np.exp((scores.astype(np.float64) - peak) / temperature).sum()
    assert mass_of(scores, peak, temperature, np.empty(size, np.float32)) == pytest.approx(exact, rel=1e-6)


def test_fractions_and_exponents_are_frexp_s() -> None:
    random = np.random.default_rng(3)
    ends = [5e-324, 1e-310, np.nextafter(2.0**-1022, 0.0), 2.0**-1022, 0.5, np.nextafter(1.0, 0.0), 1.0, 1.7e308]
    for x in [*map(float, ends), *(2.0 ** random.uniform(-1074.0, 1024.0, 2000)).tolist()]:
        assert fraction_and_exponent(x) == math.frexp(x), x


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e-300, 36.0])
def test_the_logarithm_is_one(scale: float) -> None:
    for x in (scale * np.random.default_rng(0).random(2000)).tolist():
        assert logarithm(x) == pytest.approx(math.log(x), rel=2 * sys.float_info.epsilon, abs=0)
        if scale < 1e-10:
            assert logarithm(1.0 - x) == pytest.approx(math.log(1.0 - x), rel=2 * sys.float_info.epsilon, abs=0)
