"""`assess`: finds locality where it is, denies it where it is not, and says when it cannot tell."""

import numpy as np
import pytest

from eldr.routing import Recorded, StepCost
from eldr.routing.assess import SERVED, Plan, assess
from tests.routing.helpers import SMALL, recorded
from tests.routing.test_predict import with_decode

COST = StepCost(base=1e-3, expert=1e-4)


def plan(**changes):
    return Plan(**{"workers": 4, "batch": 4, "cost": COST, "rounds": 3, "requests": 120, **changes})


def test_domains_are_worth_a_deployment():
    report = assess(recorded(200), plan())
    assert report["verdict"] == "deploy"
    rows = report["policies"]
    assert set(rows) == set(SERVED)
    assert rows["least_requests"]["tpot_reduction"] == 0.0
    assert rows["marginal_cost"]["tpot_reduction"] > 0.05
    assert abs(rows["popularity"]["tpot_reduction"]) < 0.03
    assert rows["other_request"]["tpot_reduction"] < rows["marginal_cost"]["interval"][0]
    assert (
        rows["marginal_cost"]["distinct_per_layer"] < rows["least_requests"]["distinct_per_layer"]
    )
    assert "flattering" in report["truth"]
    low, high = rows["marginal_cost"]["interval"]
    assert low < rows["marginal_cost"]["tpot_reduction"] < high


def test_prompts_that_say_nothing_about_decoding_are_not():
    data = with_decode(200, noise_layers=(0, 1, 2))
    report = assess(data, plan())
    assert report["truth"] == "decode counts"
    assert report["verdict"] != "deploy"
    assert abs(report["policies"]["marginal_cost"]["tpot_reduction"]) < 0.03


def test_uniform_traffic_is_not_worth_it():
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(2000, np.full(16, 1 / 16), 3) for _ in range(160)])
    data = Recorded(
        counts.astype(np.uint32), np.full(160, 1000, np.int32), np.ones(160, np.float32), SMALL
    )
    assert assess(data, plan())["verdict"] == "not worth it"


def test_few_signatures_need_more():
    assert assess(recorded(40), plan())["verdict"] == "needs more data"
    with pytest.raises(ValueError, match="15 signatures for 4 workers"):
        assess(recorded(15), plan())


@pytest.mark.parametrize("changes", [{"workers": 1}, {"batch": 0}, {"rounds": 1}])
def test_impossible_plans(changes):
    with pytest.raises(ValueError, match="assess: needs"):
        plan(**changes)
