"""Every figure of the page against cases worked out by hand."""

from __future__ import annotations

import math
import string

import numpy as np
import pytest

from eldr.serving.page import numbers
from eldr.serving.page.branches import MOST_BRANCHES, OTHER, over_time
from eldr.serving.page.counters import Counters, parse, realised
from eldr.serving.page.facts import Fact, of_row
from eldr.serving.page.heat import digits, heat
from eldr.serving.page.window import Window


def fact(time: float, worker: str = "a", us: float = 1.0, branch: str = "band", **more) -> Fact:
    return Fact(time, worker, "p", branch, us, **more)


DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


def counters(steps: int, use: list[list[int]], by_batch: dict[str, list[int]]) -> Counters:
    return parse({"v": 1, "steps": steps, "use": use, "by_batch": by_batch})


# A worker of 2 layers x 3 experts. Two steps: of batch 1 with 1 + 1 experts, of batch 3 with 3 + 2.
ONE = counters(2, [[2, 1, 1], [1, 2, 0]], {"1": [1, 2], "3": [1, 5]})


def test_decision_time_is_a_quantile_that_was_measured() -> None:
    """Of 1..100 the 50th is the median and the 99th the 99th percentile."""
    found = numbers.decision_time([fact(0, us=float(us)) for us in range(100, 0, -1)])
    assert (found["p50_us"], found["p99_us"], found["n"]) == (50.0, 99.0, 100)
    one = numbers.decision_time([fact(0, us=7.0)])
    assert (one["p50_us"], one["p99_us"]) == (7.0, 7.0)
    assert numbers.decision_time([])["why"] == "no decision yet"


def test_load_skew_counts_idle_workers() -> None:
    """6, 2 and 0: mean 8 / 3, so 6 is 2.25 times the mean."""
    found = numbers.load_skew({"a": 2.0, "b": 6.0, "c": 0.0}, "requests")
    assert found["max_over_mean"] == pytest.approx(2.25)
    assert (found["worker"], found["max"], found["mean"]) == ("b", 6.0, pytest.approx(8 / 3))
    assert numbers.load_skew({"a": 3.0, "b": 3.0}, "")["max_over_mean"] == 1.0
    assert numbers.load_skew({"a": 0.0}, "")["why"] == "nothing is running"
    assert numbers.load_skew({}, "")["why"] == "no decode worker"


def test_mean_running_is_request_seconds_over_the_span() -> None:
    """From 0 to 10 s: `a` runs 4 + 6 request seconds, `b` 2, `c` none."""
    facts = [fact(0.0, "a", seconds=4.0), fact(4.0, "a", seconds=6.0), fact(1.0, "b", seconds=2.0)]
    load = numbers.mean_running(facts, ["a", "b", "c"])
    assert load == pytest.approx({"a": 1.0, "b": 0.2, "c": 0.0})
    assert numbers.mean_running([fact(0.0)], ["a"]) == {"a": 0.0}


def test_prediction_error() -> None:
    """Errors +1, -1, +3: mean 1, mean size 5 / 3. Deviations (-1, 0, 1) and (0, 1, -1)."""
    found = numbers.prediction_error([(4.0, 3.0, "a"), (5.0, 6.0, "a"), (6.0, 3.0, "b")])
    assert found["mae"] == pytest.approx(5 / 3)
    assert found["bias"] == pytest.approx(1.0)
    assert found["correlation"] == pytest.approx(0.0)
    line = numbers.prediction_error([(x, 2 * x + 1, "a") for x in (1.0, 2.0, 5.0)])
    assert line["correlation"] == pytest.approx(1.0)
    assert numbers.prediction_error([(1.0, 1.0, "a")] * 5)["correlation"] is None
    assert numbers.prediction_error([])["mae"] is None


def test_saving_compares_expected_with_expected() -> None:
    """6 against the better shadow's 8 is a quarter less; it is an estimate, whatever is counted."""
    found = numbers.experts(7.0, 6.0, {"round_robin": 9.0, "least_requests": 8.0})
    assert found["saving"] == pytest.approx(0.25)
    assert found["basis"] == "estimate"
    assert found["shadow"] == {"policy": "least_requests", "expected": 8.0, "others": 1}
    alone = numbers.experts(7.0, 6.0, {})
    assert alone["saving"] is None
    assert "--shadow" in alone["notes"][0]
    assert numbers.experts(None, 6.0, {"x": 8.0}, why="because")["notes"] == ["because"]


def test_measured_differences_are_relative_with_their_interval() -> None:
    """-2 ms on 20 ms is -10 %; the interval -3..-1 ms is -15..-5 %."""
    tpot = {"estimate": -0.002, "relative": -0.1, "ci95": [-0.003, -0.001], "verdict": "faster"}
    found = numbers.measured_differences({"differences": {"b": {"against": "a", "tpot_s": tpot}}})
    assert found[0]["ci95"] == pytest.approx([-0.15, -0.05])
    assert (found[0]["relative"], found[0]["verdict"]) == (-0.1, "faster")
    early = {"estimate": None, "relative": None, "ci95": None, "verdict": "needs more data"}
    found = numbers.measured_differences({"differences": {"b": {"against": "a", "tpot_s": early}}})
    assert found[0]["ci95"] is None
    assert numbers.measured_differences(None) == []


def test_counters_by_hand() -> None:
    """7 experts over 2 layers and 2 steps: 1.75. Seen by requests: (1*2 + 3*5) / 2 / (1 + 3)."""
    assert ONE.per_step() == pytest.approx(7 / 4)
    assert ONE.request_weight() == (8.5, 4.0)
    assert realised([ONE]) == pytest.approx(2.125)
    assert realised([]) is None
    later = counters(3, [[3, 1, 1], [1, 2, 1]], {"1": [2, 4], "3": [1, 5]})
    change = later.since(ONE)
    assert change.steps == 1
    assert change.per_step() == pytest.approx(1.0)
    assert change.request_weight() == (1.0, 1.0)
    assert ONE.since(later) is ONE  # it restarted
    assert ONE.since(ONE).per_step() is None


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"v": 2, "steps": 1, "use": [[1]], "by_batch": {}},
        {"v": 1, "steps": "x", "use": [[1]], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [[1], [1, 2]], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [1], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [[2]], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [[-1]], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [[1]], "by_batch": {"a": [1, 1]}},
        {"v": 1, "steps": 1, "use": [[1]], "by_batch": [1]},
        {"v": 1, "steps": 1e999, "use": [[1]], "by_batch": {}},
        {"v": 1, "steps": 1, "use": [[]], "by_batch": {}},
    ],
)
def test_counters_that_are_none(answer: object) -> None:
    with pytest.raises(ValueError, match="no decode counters"):
        parse(answer)


def test_heat_of_one_layer_and_of_all() -> None:
    """Worker b reads expert 2 of layer 0 in 3 of 4 steps; experts go to who reads them most."""
    other = counters(4, [[0, 1, 3], [4, 0, 0]], {"1": [4, 8]})
    found = heat({"b": other, "a": ONE}, 0, {})
    assert found["workers"] == ["a", "b"]
    # Sixty-thirds of 1, 1/2, 1/2 and 0, 1/4, 3/4; halves go to the even number.
    levels = [63, 32, 32, 0, 16, 47]
    assert [DIGITS.index(digit) for digit in found["cells"]] == levels
    assert found["distinct"] == [2.0, 1.0]
    mean = heat({"b": other, "a": ONE}, None, {})
    # a: (2 + 1) / 2 / 2, (1 + 2) / 2 / 2, 1 / 2 / 2; b: 4 / 2 / 4, 1 / 2 / 4, 3 / 2 / 4
    assert mean["distinct"] == [pytest.approx(1.75), pytest.approx(1.0)]
    assert heat({"a": ONE}, 9, {})["layer"] is None


def test_never_and_always_are_told_from_nearly() -> None:
    assert digits(np.array([0.0, 1e-9, 1 - 1e-9, 1.0])) == "AB+/"


def test_heat_says_why_it_is_empty() -> None:
    assert heat({}, None, {"http://d": "HTTP 404"})["why"] == "http://d: HTTP 404"
    assert heat({}, None, {})["why"] == "no decode counters"
    other = counters(1, [[1, 0]], {"1": [1, 1]})
    assert "different shapes" in heat({"a": ONE, "b": other}, None, {})["why"]


def test_branches_over_time() -> None:
    """Slices of 2.5 s from 0 to 10: the last moment belongs to the last slice."""
    facts = [fact(t, branch=b) for t, b in ((0, "x"), (2.6, "y"), (2.7, "x"), (10, "x"))]
    found = over_time(facts, slices=4)
    assert (found["start"], found["width"]) == (0, 2.5)
    assert found["names"] == ["x", "y"]
    assert found["counts"] == [[1, 0], [1, 1], [0, 0], [1, 0]]
    assert found["totals"] == [3, 1]
    assert over_time([])["names"] == []


def test_rare_branches_are_summed_up() -> None:
    facts = [fact(i, branch=f"b{b:02d}") for b in range(20) for i in range(20 - b)]
    found = over_time(facts)
    assert len(found["names"]) == MOST_BRANCHES
    assert found["names"][-1] == OTHER
    assert sum(found["totals"]) == len(facts)
    assert found["totals"][-1] == sum(range(1, 15))


def status(**rows: tuple[int, float | None]) -> list[dict]:
    return [{"name": n, "requests": r, "experts": x} for n, (r, x) in rows.items()]


def test_window_by_hand() -> None:
    """2 layers. Live: (3*8 + 1*4) / 4 / 2 = 3.5; shadow: (2*10 + 2*6) / 4 / 2 = 4."""
    window = Window(2)
    shadow = {"rr": status(a=(2, 10.0), b=(2, 6.0))}
    window.tick(status(a=(3, 8.0), b=(1, 4.0)), shadow)
    assert window.expected() == (3.5, {"rr": 4.0})
    assert window.load() == {"a": 3.0, "b": 1.0}
    window.tick(status(a=(0, 0.0), b=(0, 0.0)), shadow)  # nothing runs: no word on expectations
    assert window.expected() == (3.5, {"rr": 4.0})
    assert window.load() == {"a": 1.5, "b": 0.5}


def test_pairs_are_of_one_interval() -> None:
    window = Window(2)
    window.poll(0.0, {"a": ONE, "b": "HTTP 500"})
    assert window.span() == "since the workers' start"
    assert window.problems == {"b": "HTTP 500"}
    window.tick(status(a=(1, 4.0)), {})
    window.tick(status(a=(1, 2.0)), {})
    window.tick(status(a=(0, 0.0)), {})  # idle ticks have no steps
    later = counters(3, [[3, 1, 1], [1, 2, 1]], {"1": [2, 4], "3": [1, 5]})
    window.poll(4.0, {"a": later})
    assert list(window.pairs) == [(1.5, 1.0, "a")]
    assert window.span() == "over the last 4 s"
    assert window.realised() == pytest.approx(1.0)
    window.poll(8.0, {"a": later})
    assert len(window.pairs) == 1


def test_quantile_of_any_size() -> None:
    for n in range(1, 50):
        values = [float(i) for i in range(n)]
        assert numbers.quantile(values, 0.99) == values[math.ceil(0.99 * n) - 1]
    assert numbers.quantile([], 0.5) is None


def test_row_that_is_no_decision() -> None:
    with pytest.raises(ValueError, match="not a decision"):
        of_row({"time": 1})
