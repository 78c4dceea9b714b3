import pytest

from benchmarks import controller
from ondevice.decoding.costs import Costs


@pytest.mark.parametrize("drafter", controller.MAKERS)
def test_every_drafter_is_timed(drafter: str) -> None:
    costs = Costs()
    made = controller.MAKERS[drafter](costs)
    schedule = None if made is None else controller.ClaimedTimes(costs)
    assert controller.microseconds_per_round(made, schedule, 0.9, 120) > 0
    if schedule is not None:
        assert costs.forwards(1)[0] == pytest.approx(controller.FORWARD_S + controller.ROW_S, rel=0.01)
