"""The four mixes, and the split into calibration and serving."""

from __future__ import annotations

import numpy as np
import pytest

from eldr.simulation.traffic import Mix, draw, split
from eldr.workload.arrivals import poisson
from tests.simulation.helpers import random_trace

TRACE = random_trace(requests=100, domains=8)  # 13 or 12 requests a domain
ROWS = np.arange(100)
ARRIVALS = poisson(1.0, 8000, 0)


def shares(traffic, part=slice(None)):
    return np.bincount(traffic.domain[part], minlength=8) / len(traffic.domain[part])


def test_same_keeps_the_traces_shares_even_levels_and_skewed_follows_the_rank():
    rows = np.concatenate(
        [np.flatnonzero(TRACE.domain == 0), np.flatnonzero(TRACE.domain == 5)[:3]]
    )
    same = shares(draw(TRACE, rows, Mix.SAME, ARRIVALS, 1))
    assert same[5] == pytest.approx(3 / 16, abs=0.02)
    assert same[0] == pytest.approx(13 / 16, abs=0.02)
    even = shares(draw(TRACE, rows, "even", ARRIVALS, 1))
    assert even[[0, 5]] == pytest.approx([0.5, 0.5], abs=0.02)
    skewed = shares(draw(TRACE, ROWS, "skewed", ARRIVALS, 1))
    rank = 1 / np.arange(1, 9)
    assert skewed == pytest.approx(rank / rank.sum(), abs=0.02)


def test_drift_moves_a_window_of_neighbours_through_all_domains_once():
    traffic = draw(TRACE, ROWS, "drift", ARRIVALS, 1)
    assert set(traffic.domain) == set(range(8))
    first, last = traffic.domain[:200], traffic.domain[-200:]
    assert set(first) <= {0, 1, 2}
    assert set(last) <= {5, 6, 7}
    means = [traffic.domain[i : i + 1000].mean() for i in range(0, 8000, 1000)]
    assert means == sorted(means)
    for i in range(0, 8000, 500):
        seen = np.unique(traffic.domain[i : i + 100])
        assert np.ptp(seen) <= 2  # two domains wide: three while it crosses a border


def test_every_row_of_a_domain_is_drawn_and_no_other():
    for mix in Mix:
        traffic = draw(TRACE, ROWS[10:], mix, ARRIVALS, 2)
        assert set(traffic.rows) <= set(ROWS[10:].tolist())
        np.testing.assert_array_equal(TRACE.domain[traffic.rows], traffic.domain)
    again = draw(TRACE, ROWS[10:], mix, ARRIVALS, 2)
    np.testing.assert_array_equal(again.rows, traffic.rows)


def test_split_is_disjoint_complete_and_by_domain():
    halves = split(TRACE, seed=3)
    both = np.concatenate([halves.calibration, halves.serving])
    assert sorted(both) == list(range(100))
    count = np.bincount(TRACE.domain[halves.calibration], minlength=8)
    assert set(count.tolist()) <= {6, 7}
    assert (split(TRACE, seed=4).calibration != halves.calibration).any()
    with pytest.raises(ValueError, match="share"):
        split(TRACE, 0, 1.0)
    with pytest.raises(ValueError, match="'d0' has one request"):
        split(random_trace(requests=4), 0)


def test_empty_and_unknown_mixes():
    with pytest.raises(ValueError, match="empty"):
        draw(TRACE, ROWS[:0], Mix.SAME, ARRIVALS, 0)
    with pytest.raises(ValueError, match="sideways"):
        draw(TRACE, ROWS, "sideways", ARRIVALS, 0)
