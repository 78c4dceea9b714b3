import numpy as np

from ondevice.generate.controller import MIN_PROBE_INTERVAL, PROBE_SHARE, Probes


def waits(probes: Probes, gains: list[float], loss: float) -> list[int]:
    """Rounds without a probe before each of these."""
    seen = []
    for gain in gains:
        seen.append(0)
        while not probes.due():
            seen[-1] += 1
        probes.observe(gain, loss)
    return seen


def test_failing_probes_back_off_to_their_share_of_the_time() -> None:
    assert waits(Probes(), [-0.5] * 9, loss=0.5) == [0, 2, 4, 8, 16, 32, 50, 50, 50]
    assert waits(Probes(), [-0.01] * 6, loss=0.01) == [
        0,
        2,
        4,
        MIN_PROBE_INTERVAL,
        MIN_PROBE_INTERVAL,
        MIN_PROBE_INTERVAL,
    ]


def test_a_success_is_followed_up_at_once() -> None:
    probes = Probes()
    waits(probes, [-0.2] * 20, loss=0.2)
    assert waits(probes, [0.8, 0.8, -0.2, -0.2], loss=0.2) == [20, 0, 0, 0]


def test_successes_that_lose_on_average_stay_rare() -> None:
    """Two of three succeed, yet the third costs more than both bring."""
    gains = np.random.default_rng(0).choice([0.1, 0.1, -0.9], 600).tolist()
    total = sum(waits(Probes(), gains, loss=0.9)) + len(gains)
    assert -sum(gains) / total < 2 * PROBE_SHARE


def test_a_long_success_is_forgotten_soon() -> None:
    probes = Probes()
    waits(probes, [0.9] * 500, loss=0.1)
    assert sum(wait == 0 for wait in waits(probes, [-0.1] * 40, loss=0.1)) <= 21
