"""Two pictures of a run: experts per step by policy, and which worker reads which expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; must precede the pyplot import

import matplotlib.pyplot as plt
import numpy as np

from eldr.demo.config import LOAD_BALANCERS
from eldr.demo.measure import Floats, PolicyResult

_GREY, _BLUE = "#9aa5b1", "#1f6feb"


def plot_distinct(results: Sequence[PolicyResult], experts: int, path: Path) -> None:
    """Bars of distinct experts per layer and decode step, one per policy."""
    names = [r.policy for r in results]
    values = [r.distinct_per_step for r in results]
    colors = [_GREY if n in LOAD_BALANCERS else _BLUE for n in names]
    figure, axes = plt.subplots(figsize=(7, 0.7 * len(names) + 1.6), layout="constrained")
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [f"{v:.1f}" for v in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(f"distinct experts read per layer and decode step (of {experts})")
    axes.set_title("Same requests, same order: experts read by the decode workers", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_heat_map(results: Sequence[PolicyResult], layer: int, path: Path) -> None:
    """One panel per policy: share of decode steps in which a worker read an expert of `layer`.

    Experts keep one order in all panels: grouped by the worker that reads them most under the
    policy whose workers differ most, so that its blocks are visible and the others can be
    compared with them.
    """
    shares = [r.use_share[:, layer] for r in results]
    order = _block_order(max(shares, key=lambda share: float((share.max(0) - share.mean(0)).sum())))
    figure, panels = plt.subplots(
        len(results), 1, figsize=(9, 1.25 * len(results) + 1.2), layout="constrained", squeeze=False
    )
    for axes, result in zip(panels[:, 0], results, strict=True):
        share = result.use_share[:, layer][:, order]
        image = axes.imshow(share, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axes.set_title(result.policy, fontsize=10, loc="left")
        axes.set_yticks(range(len(share)), [f"decode-{w}" for w in range(len(share))], fontsize=8)
        axes.set_xticks([])
    panels[-1, 0].set_xlabel(f"experts of MoE layer {layer}, same order in every panel")
    figure.colorbar(image, ax=panels, label="share of decode steps that read the expert")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _block_order(share: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Experts [E] sorted by their main worker, then by how much that worker prefers them."""
    main = share.argmax(axis=0)
    excess = share.max(axis=0) - share.mean(axis=0)
    order: np.ndarray[tuple[int], np.dtype[np.intp]] = np.lexsort((-excess, main))
    return order
