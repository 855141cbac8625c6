"""Pictures of a cell: TPOT distribution, gain over time, and median against tail; PNG and SVG."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eldr.simulation.report import LOAD_BALANCERS, measured
from eldr.simulation.run import Outcome

_BINS = 24


def draw(
    outcomes: Mapping[str, Outcome], figures: Mapping[str, Any], title: str, stem: Path
) -> list[Path]:
    """Writes `stem`-{cdf,time,pareto}.{png,svg}.

    Args:
        outcomes: policy -> outcome of the same traffic.
        figures: policy -> figures as `report.summarise` gives them.
        title: of every picture.
        stem: path without the ending; its folder is made.

    Raises:
        ImportError: matplotlib is missing; the message says what to install.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'eldr[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for name, paint in (("cdf", _cdf), ("time", _time), ("pareto", _pareto)):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if name == "pareto":
            paint(axes, figures)
        else:
            paint(axes, outcomes)
        for ending in ("png", "svg"):
            path = stem.with_name(f"{stem.name}-{name}.{ending}")
            # A fixed hash salt and no date: equal runs write equal files.
            with mpl.rc_context({"svg.hashsalt": "eldr"}):
                figure.savefig(path, dpi=150, metadata={"Date": None} if ending == "svg" else None)
            written.append(path)
        plt.close(figure)
    return written


def _cdf(axes: Any, outcomes: Mapping[str, Outcome]) -> None:
    for policy, outcome in outcomes.items():
        values = np.sort(_tpot(outcome)[measured(len(outcome.traffic))])
        values = values[np.isfinite(values)]
        share = np.arange(1, len(values) + 1) / len(values)
        axes.plot(values, share, label=policy, **_style(policy))
    axes.set_xlabel("time per output token [ms]")
    axes.set_ylabel("share of requests")
    axes.legend(fontsize=8)


def _time(axes: Any, outcomes: Mapping[str, Outcome]) -> None:
    """Median gain of each slice of the run against the load balancer best in that slice."""
    count = len(next(iter(outcomes.values())).traffic)
    edges = np.linspace(0, count, min(_BINS, count // 20 + 1) + 1).astype(int)
    slices = list(itertools.pairwise(edges))
    medians = {
        p: np.array([np.nanmedian(_tpot(o)[a:b]) for a, b in slices]) for p, o in outcomes.items()
    }
    base = [m for p, m in medians.items() if p in LOAD_BALANCERS]
    if not base:
        axes.text(0.5, 0.5, "no load balancer to compare with", ha="center")
        return
    best = np.min(base, axis=0)
    middle = (edges[:-1] + edges[1:]) / 2 / count
    for policy, values in medians.items():
        if policy not in LOAD_BALANCERS:
            axes.plot(middle, 100 * (1 - values / best), marker=".", label=policy)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("share of the run")
    axes.set_ylabel("gain of the median TPOT [%]")
    axes.legend(fontsize=8)


def _pareto(axes: Any, figures: Mapping[str, Any]) -> None:
    for policy, values in figures.items():
        x, y = values["tpot_ms"]["p50"], values["tpot_ms"]["p99"]
        axes.scatter([x], [y], marker="s" if policy in LOAD_BALANCERS else "o", label=policy)
    axes.set_xlabel("TPOT P50 [ms]")
    axes.set_ylabel("TPOT P99 [ms]")
    axes.legend(fontsize=8)


def _tpot(outcome: Outcome) -> Any:
    return outcome.tpot * 1e3


def _style(policy: str) -> dict[str, Any]:
    return {"linestyle": "--", "linewidth": 1.0} if policy in LOAD_BALANCERS else {}
