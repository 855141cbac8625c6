"""Traffic: which recorded requests arrive, and when; the four mixes over a trace's domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from eldr.workload.arrivals import Arrivals
from eldr.workload.traces import ExpertTrace

Index = npt.NDArray[np.int64]


class Mix(StrEnum):
    """How requests are spread over the domains.

    same: the trace's own shares. even: every domain equally. skewed: shares proportional to 1/rank,
    in the order of the trace's domains. drift: a window of neighbouring domains that moves through
    all of them once.
    """

    SAME = "same"
    EVEN = "even"
    SKEWED = "skewed"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class Split:
    """Requests of a trace that calibrate, and those that are served; disjoint, sorted indices."""

    calibration: Index
    serving: Index


def split(trace: ExpertTrace, seed: int, share: float = 0.5) -> Split:
    """Splits every domain's requests at random; `share` of each calibrates.

    Raises:
        ValueError: share outside (0, 1), or a domain with a single request.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"split: share must be in (0, 1), got {share}")
    rng = np.random.default_rng([seed, 0x5EED])
    calibration, serving = [], []
    for domain in np.unique(trace.domain):
        rows = rng.permutation(np.flatnonzero(trace.domain == domain))
        if len(rows) < 2:
            name = trace.domains[int(domain)]
            raise ValueError(f"split: domain {name!r} has one request, it cannot be halved")
        cut = min(max(round(share * len(rows)), 1), len(rows) - 1)
        calibration.append(rows[:cut])
        serving.append(rows[cut:])
    return Split(np.sort(np.concatenate(calibration)), np.sort(np.concatenate(serving)))


def resample(
    trace: ExpertTrace, rows: Index, shares: Mapping[str, float], seed: int, size: int = 1000
) -> Index:
    """About `size` of the rows, drawn so that domains have the given shares; repeats allowed.

    Raises:
        ValueError: a domain that the rows do not have, or a share that is not positive.
    """
    rng = np.random.default_rng([seed, 0x5A])
    total = sum(shares.values())
    picked = []
    for name, share in shares.items():
        index = trace.domains.index(name) if name in trace.domains else -1
        pool = rows[trace.domain[rows] == index]
        if not len(pool) or not share > 0:
            raise ValueError(f"shares: no request of domain {name!r}, or its share is not positive")
        picked.append(rng.choice(pool, max(1, round(size * share / total))))
    return np.concatenate(picked)


@dataclass(frozen=True, eq=False)
class Traffic:
    """N requests in order of arrival.

    Attributes:
        arrivals: times and lengths.
        rows: request of the trace that each one replays, int64 [N].
        domain: its domain, int64 [N].
    """

    arrivals: Arrivals
    rows: Index
    domain: Index

    def __len__(self) -> int:
        return len(self.rows)


def draw(trace: ExpertTrace, rows: Index, mix: Mix | str, arrivals: Arrivals, seed: int) -> Traffic:
    """Gives each arrival a recorded request: its domain by the mix, then any of its rows.

    Args:
        trace: the trace.
        rows: requests of the trace that may be replayed.
        mix: kind of traffic.
        arrivals: times and lengths.
        seed: of the draws.

    Raises:
        ValueError: unknown mix, or no rows to draw from.
    """
    if len(rows) == 0:
        raise ValueError("traffic: the mix is empty, there is no request to replay")
    rng = np.random.default_rng([seed, 0xD0])
    count = len(arrivals)
    of = trace.domain[rows].astype(np.int64)
    present = np.unique(of)
    kind = Mix(mix)
    if kind is Mix.SAME:
        picked = rng.integers(len(rows), size=count)
        return Traffic(arrivals, rows[picked], of[picked])
    if kind is Mix.DRIFT:
        domain = present[_drifting(len(present), count, rng)]
    else:
        share = np.ones(len(present))
        if kind is Mix.SKEWED:
            share = 1.0 / np.arange(1, len(present) + 1)
        domain = rng.choice(present, count, p=share / share.sum())
    order = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[order], np.arange(of.max() + 2))
    sizes = np.diff(starts)[domain]
    picked = order[starts[domain] + (rng.random(count) * sizes).astype(np.int64)]
    return Traffic(arrivals, rows[picked], domain)


def _drifting(domains: int, count: int, rng: np.random.Generator) -> Index:
    """Positions [count]: uniform in a window that slides from the first domain to the last.

    The window is a quarter of the domains wide, and never narrower than two.
    """
    width = float(min(domains, max(2.0, domains / 4)))
    start = np.linspace(0.0, domains - width, count)
    at = start + width * rng.random(count)
    return np.minimum(at.astype(np.int64), domains - 1)
