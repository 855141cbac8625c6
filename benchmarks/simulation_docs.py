"""The figures of docs/scale.md and docs/simulation.md, made from the results they stand for.

    python -m benchmarks.simulation_docs            # writes them
    python -m benchmarks.simulation_docs --check    # exit code 1 if one differs from results/

What stands between `<!-- figures: NAME -->` and `<!-- end -->` is made here, the rest is by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.figures import ROOT, grid, pair, result, wrap
from benchmarks.figures import render as render_page

BASE = "least_requests"
_RUNS = {
    "discrete": "every token's experts counted",
    "expected": "expected values, one router over all of them",
    "expected_split": "the same, split among 16 routers",
    "expected_base": "the same, one router",
}


def machine(out: Mapping[str, Any]) -> str:
    """Where, when and beside what a result was measured."""
    return (
        f"on {out['machine']['cores']} cores of an {out['machine']['cpu']}, at a load average of "
        f"{out['load_average']:.1f}, {out['date']}"
    )


def conditions(out: Mapping[str, Any]) -> str:
    """docs/scale.md: what everything there comes from."""
    return wrap(
        f"Everything here is simulated, with the policy `marginal_cost`: `{out['command']}` "
        f"{machine(out)}. Decision times are medians of 300 single decisions. The full output is "
        "in `results/simulation_scale.json`."
    )


def decisions(out: Mapping[str, Any]) -> str:
    """docs/scale.md: time and state of one decision."""
    head = ("geometry", "decode workers", "reserve (choose + commit)", "release",
            "workers' state", "a running request")  # fmt: skip
    rows = (
        (row["geometry"], f"{row['workers']:,}", f"{row['reserve_us']:,.0f} us",
         f"{row['release_us']:.0f} us", f"{row['worker_state_mb']:.2f} MB",
         f"{row['request_state_kb']:.1f} KB")
        for row in out["decision"]
    )  # fmt: skip
    return grid(head, *rows)


def routers(out: Mapping[str, Any]) -> str:
    """docs/scale.md: what several routers lose, P50 / P99 over least_requests in %."""
    gain = {(row["routers"], row["fleet"]): pair(row["gain_pct"]) for row in out["routers"]}
    head = ("routers", "each owns a share of the workers",
            "all use all workers, blind to each other",
            "all use all, and read the workers' counters (0.5 s, trust 1)")  # fmt: skip
    several = sorted({count for count, kind in gain if kind != "one"})
    rows = ((str(n), *(gain[n, kind] for kind in ("split", "blind", "telemetry"))) for n in several)
    return grid(head, ("1", gain[1, "one"], "", ""), *rows)


def whole_fleet(out: Mapping[str, Any]) -> str:
    """docs/scale.md: one router against several on the largest fleet."""
    one, split, base = (out[part] for part in ("expected", "expected_split", "expected_base"))
    whole, parted = (
        pair({q: 100 * (1 - row["tpot_ms"][q] / base["tpot_ms"][q]) for q in ("p50", "p99")})
        for row in (one, split)
    )
    return wrap(
        f"At {one['workers']:,} workers and {one['requests']:,} requests: one router over all of "
        f"them gains {whole}, {split['routers']} that own {one['workers'] // split['routers']} "
        f"each {parted}."
    )


def runs(out: Mapping[str, Any]) -> str:
    """docs/scale.md: what the simulator takes, for the parts that were run."""
    rows = []
    for part, how in _RUNS.items():
        if (row := out.get(part)) is None:
            continue
        policy = row.get("policy") or f"{len(row['policies'])} policies"
        rows.append((
            f"{row['workers']:,} workers, {row['requests']:,} requests, {policy}: {how}",
            f"{row['wall_s']:.0f} s", f"{row['cpu_s']:.0f} s", f"{row['peak_gb']:.2f} GB",
        ))  # fmt: skip
    return grid(("run", "wall time", "processor time", "memory"), *rows)


def policies(out: Mapping[str, Any]) -> str:
    """docs/simulation.md: gains in twenty cells."""
    return str(out["table"])


def cpu_tpot(out: Mapping[str, Any]) -> str:
    """docs/simulation.md: the measured TPOT."""
    clock, how = out["clock"], out["parameters"]
    name = "wall clock" if clock == "wall" else "processor time"
    fits = out["fit"][clock]
    alone, both = fits["sweep"]["distinct"], fits["all"]["distinct_and_batch"]
    rows = []
    for policy, row in out["policies"][clock].items():
        low, high = row["interval"]
        over = f"{row['ratio']:.3f}" + (f" ({low:.3f} to {high:.3f})" if policy != BASE else "")
        rows.append((
            f"`{policy}`", f"{row['batch']:.1f}", f"{row['distinct']:.1f}",
            f"{row['tpot_ms']:.1f}", over, f"{row['fitted_ratio']:.3f}",
            f"{out['simulated'][policy]['ratio']:.3f}",
        ))  # fmt: skip
    head = ("policy", "batch", "distinct experts", "median TPOT [ms]",
            f"over that of `{BASE}` (95 %)", "from the fit", "as simulated")  # fmt: skip
    intro = wrap(
        f"`{out['command']}` {machine(out)}: real vLLM on one thread, {len(out['batches'])} "
        f"batches, those of the policies at {how['moments']} moments of {how['workers']} workers, "
        f"each measured {how['rounds']} times for {how['steps']} steps; {out['seconds'] / 60:.0f} "
        f"minutes. Times are by {name}; during the steps the process did not run in "
        f"{100 * out['waited']:.1f} % of the wall time."
    )
    cost = both["ms"]
    verdict = wrap(
        f"Over the sweep a step takes {alone['ms']['base']:.1f} ms and {alone['ms']['expert']:.2f} "
        f"ms for each distinct expert (mean over the layers), R^2 = {alone['r2']:.3f} (of all "
        f"batches, {fits['all']['distinct']['r2']:.3f}). With the batch size beside it, over all "
        f"batches: {cost['base']:.1f} ms, {cost['expert']:.2f} ms for each distinct expert and "
        f"{cost['request']:.2f} ms for each request, R^2 = {both['r2']:.3f}."
    )
    return "\n\n".join([intro, verdict, grid(head, *rows)])


Figure = tuple[str, Callable[[Mapping[str, Any]], str]]  # a result's name, and what it becomes
PAGES: dict[str, dict[str, Figure]] = {
    "docs/scale.md": {
        "conditions": ("simulation_scale", conditions),
        "decisions": ("simulation_scale", decisions),
        "routers": ("simulation_scale", routers),
        "whole_fleet": ("simulation_scale", whole_fleet),
        "runs": ("simulation_scale", runs),
    },
    "docs/simulation.md": {
        "policies": ("policies", policies),
        "cpu_tpot": ("cpu_tpot", cpu_tpot),
    },
}


def render(page: str, figures: Mapping[str, Figure]) -> str:
    """The page with every figure made anew; raises as `figures.render`."""
    return render_page(page, {name: partial(_made, *figure) for name, figure in figures.items()})


def _made(source: str, make: Callable[[Mapping[str, Any]], str]) -> str:
    return make(result(source))


def main() -> int:
    """Writes or checks; 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation_docs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    differ = []
    for path, figures in PAGES.items():
        now = (ROOT / path).read_text("utf-8")
        made = render(now, figures)
        if made != now:
            differ.append(path)
            if not args.check:
                (ROOT / path).write_text(made, encoding="utf-8")
    print(f"{'differ' if args.check else 'wrote'}: {', '.join(differ) or 'none'}")
    return int(args.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
