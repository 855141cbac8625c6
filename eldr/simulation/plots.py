"""Pictures of a cell: TPOT distribution, gain over time, and median against tail; PNG and SVG."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eldr.simulation.report import LOAD_BALANCERS, measured
from eldr.simulation.run import Outcome

_BINS = 24
# Load balancers step back, the policies that are compared with them come forward.
_MUTED = ("#9aa5b1", "#5f6b7a", "#b8a58c", "#7f9c96")
_VIVID = ("#0b6e99", "#d1495b", "#3a7d44", "#7d4f9e", "#c77d0a", "#2f2f2f")


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
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        shades = colours(list(outcomes))
        if name == "pareto":
            paint(axes, figures, shades)
        else:
            paint(axes, outcomes, shades)
        for ending in ("png", "svg"):
            path = stem.with_name(f"{stem.name}-{name}.{ending}")
            # A fixed hash salt and no date: equal runs write equal files.
            with mpl.rc_context({"svg.hashsalt": "eldr"}):
                figure.savefig(path, dpi=150, metadata={"Date": None} if ending == "svg" else None)
            written.append(path)
        plt.close(figure)
    return written


def colours(policies: Sequence[str]) -> dict[str, str]:
    """One colour per policy, the same in every picture."""
    ours = [p for p in policies if p not in LOAD_BALANCERS]
    found = {p: _MUTED[LOAD_BALANCERS.index(p)] for p in policies if p in LOAD_BALANCERS}
    return found | {p: _VIVID[i % len(_VIVID)] for i, p in enumerate(ours)}


def _cdf(axes: Any, outcomes: Mapping[str, Outcome], shades: Mapping[str, str]) -> None:
    ends = []
    for policy, outcome in outcomes.items():
        values = np.sort(_tpot(outcome)[measured(len(outcome.traffic))])
        values = values[np.isfinite(values)]
        if not len(values):
            continue
        share = np.arange(1, len(values) + 1) / len(values)
        style = {"linestyle": "--", "linewidth": 1.2} if policy in LOAD_BALANCERS else {}
        axes.plot(values, share, label=policy, color=shades[policy], **style)
        ends.append(np.percentile(values, (0.2, 99.8)))
    if ends:
        axes.set_xlim(min(e[0] for e in ends), max(e[1] for e in ends))
    axes.axhline(0.5, color="black", linewidth=0.5)
    axes.axhline(0.99, color="black", linewidth=0.5)
    axes.set_ylim(0, 1.01)
    axes.set_xlabel("time per output token of a request [ms]")
    axes.set_ylabel("share of requests")
    axes.legend(fontsize=8, frameon=False)


def _time(axes: Any, outcomes: Mapping[str, Outcome], shades: Mapping[str, str]) -> None:
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
    middle = 100 * (edges[:-1] + edges[1:]) / 2 / count
    for policy, values in medians.items():
        if policy not in LOAD_BALANCERS:
            gain = 100 * (1 - values / best)
            axes.plot(middle, gain, marker=".", label=policy, color=shades[policy])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlim(0, 100)
    axes.set_xlabel("requests so far [%]")
    axes.set_ylabel("median TPOT saved against\nthe best load balancer [%]")
    axes.legend(fontsize=8, frameon=False)


def _pareto(axes: Any, figures: Mapping[str, Any], shades: Mapping[str, str]) -> None:
    """P99 against P50; the line joins what no other policy beats in both."""
    points = {p: (f["tpot_ms"]["p50"], f["tpot_ms"]["p99"]) for p, f in figures.items()}
    front = sorted(
        a for a in points.values()
        if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points.values())
    )  # fmt: skip
    axes.plot(*zip(*front, strict=True), color="black", linewidth=0.8, linestyle=":")
    for policy, (x, y) in points.items():
        marker = "s" if policy in LOAD_BALANCERS else "o"
        axes.scatter([x], [y], marker=marker, s=45, color=shades[policy], label=policy, zorder=3)
    axes.margins(0.12)
    axes.set_xlabel("TPOT P50 [ms], left is better")
    axes.set_ylabel("TPOT P99 [ms], down is better")
    axes.legend(fontsize=8, frameon=False)


def _tpot(outcome: Outcome) -> Any:
    return outcome.tpot * 1e3
