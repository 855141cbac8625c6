"""The README's figures, from the results they stand for: renders them, or checks that they do.

    python -m benchmarks.readme            # writes README.md
    python -m benchmarks.readme --check    # exit code 1 if a figure differs from results/

What stands between `<!-- figures: NAME -->` and `<!-- end -->` is made here, the rest is by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import figures
from benchmarks.figures import ROOT, grid, pair, result, wrap

README = ROOT / "README.md"
_LABELS = {
    "locality_band": "locality_band (the published rule)",
    "marginal_cost": "marginal_cost (ours)",
}
_TRACES = {
    "tiny_traces": "trained tiny MoE",
    "deepseek_v2_lite_topk": "DeepSeek-V2-Lite (real routing)",
}
_COLUMNS = (
    *("policy", "distinct experts per step", "batch per step"),
    *("TPOT p50 / p99, ms", "decision p50, us", "load max/mean"),
)


def demo() -> str:
    """What `make demo` measured, with its conditions."""
    run = result("demo")
    model, checks = run["model"], run["checks"]
    rows = [_COLUMNS]
    for name, row in run["policies"].items():
        rows.append((
            _LABELS.get(name, name),
            f"{row['distinct_per_step']:.1f}",
            f"{row['batch_per_step']:.1f}",
            f"{row['tpot_ms']['p50']:.1f} / {row['tpot_ms']['p99']:.1f}",
            f"{row['decision_us']['p50']:.0f}",
            f"{row['max_over_mean_load']:.2f}",
        ))  # fmt: skip
    intro = (
        f"What `{run['command']}` printed on {run['machine']}, {run['date']}: one prefill and "
        f"three decode workers (vLLM {run['vllm']} over NIXL, real processes) serve a small "
        f"trained Qwen3-MoE ({model['layers']} layers, {model['experts']} experts, "
        f"top-{model['top_k']}); {run['requests']} held-out legal, code, mathematics and medical "
        "prompts, the same for every policy."
    )
    savings = "; ".join(_saving(name, row) for name, row in run["saving_pct"].items())
    wrong = checks["signature_mismatches"]
    outro = (
        "The experts are counted in the decode workers themselves. A larger batch reads more "
        "experts whoever is in it, and a balancer that spreads badly runs many small steps, so "
        f"policies are compared at equal batch size: {savings}. "
        f"{'All' if checks['outputs_equal'] else 'NOT all'} {checks['outputs_compared']} greedy "
        "outputs compared were equal to undisaggregated serving, "
        f"{checks['prompt_tokens_recomputed'] or 'no'} prompt tokens were recomputed, and "
        f"{checks['signatures_compared'] - wrong} of {checks['signatures_compared']} signatures "
        "were equal to vLLM's own routing record ([results/demo.json](results/demo.json)). TPOT "
        "says nothing here: a step of this tiny model is fixed cost, and the machine's cores are "
        "shared by ten processes."
    )
    return "\n\n".join([wrap(intro), grid(*rows), wrap(outro)])


def _saving(name: str, row: dict[str, Any]) -> str:
    plain, balancer = _change(row["percent"]), row["balancer"]
    if row["equal_batch"] is None:
        return f"`{name}` ran no batch size that {balancer} ran ({plain} by the plain means)"
    equal = _change(row["equal_batch"])
    return f"`{name}` read {equal} per step than {balancer} ({plain} by the plain means)"


def _change(percent: float) -> str:
    return f"{abs(percent):.1f} % {'fewer' if percent >= 0 else 'more'} experts"


def policies() -> str:
    """What the simulation of traffic found, with its conditions."""
    run = result("policies")
    seeds = re.search(r"--seeds (\d+)", run["command"])
    found = run["summary"]["marginal_cost"]
    ours = [c for c in run["cells"] if c["policy"] == "marginal_cost"]
    rows = [("trace", "gain of marginal_cost, P50 / P99", "its worst cell")]
    for trace, label in _TRACES.items():
        mean, cells = found[trace], [c["gain_pct"] for c in ours if c["trace"] == trace]
        worst = min(cells, key=lambda gain: min(gain.values()))
        rows.append((label, pair(mean), pair(worst)))
    intro = (
        "Simulated, not measured: real expert traces replayed through the same routing code, on "
        "workers whose steps read their experts from memory. TPOT gains over the best of four "
        f"load balancers in %, means over {len(ours) // len(_TRACES)} cells per trace (five kinds "
        "of traffic, two fleet sizes, the partition fitted on one of them), "
        f"{seeds[1] if seeds else 'several'} seeds, {run['date']} "
        "([results/policies.json](results/policies.json), "
        f"`{run['command'].removesuffix(' --json')}`)."
    )
    ahead, held = run["summary"]["marginal_cost"], result("policies_heldout")
    again = held["summary"]["marginal_cost"]
    same, drift = (_published(run["cells"], mix) for mix in ("same", "drift"))
    outro = (
        "The published rule (`locality_band`, the best tau of each cell) gains "
        f"{_range(same)} where traffic has the mix it was fitted on, and {_range(drift)} where the "
        "mix drifts. By the mean of both gains `marginal_cost` is ahead of it in "
        f"{ahead['beats_published_at_best_tau']} of {ahead['cells']} cells, and on other seeds, "
        "which nothing was chosen on, in "
        f"{again['beats_published_at_best_tau']} of {again['cells']} "
        "([results/policies_heldout.json](results/policies_heldout.json)); the narrowest margins, "
        "with eight workers and the very mix that its partition was fitted on, are within noise "
        "([docs/research.md](docs/research.md)). No figure here was measured on a GPU; "
        "`make gpu-check` measures yours."
    )
    every = f"<details><summary>All {len(ours)} cells</summary>\n\n{run['table']}\n\n</details>"
    return "\n\n".join([wrap(intro), grid(*rows), every, wrap(outro)])


def _published(cells: list[dict[str, Any]], mix: str) -> list[dict[str, float]]:
    """Gains of the published rule in every cell of `mix`, at the tau with the best sum of both."""
    best: dict[tuple[Any, ...], dict[str, float]] = {}
    for cell in cells:
        if cell["mix"] == mix and cell["policy"].startswith("locality_band"):
            key, gain = (cell["trace"], cell["workers"], cell["arrivals"]), cell["gain_pct"]
            if key not in best or sum(gain.values()) > sum(best[key].values()):
                best[key] = gain
    return list(best.values())


def _range(gains: list[dict[str, float]]) -> str:
    def ends(name: str) -> str:
        return f"{min(g[name] for g in gains):+.1f} to {max(g[name] for g in gains):+.1f} %"

    return f"{ends('p50')} at P50 and {ends('p99')} at P99"


FIGURES: dict[str, Callable[[], str]] = {"demo": demo, "policies": policies}


def render(page: str) -> str:
    """README.md with every figure made anew; raises as `figures.render`."""
    return figures.render(page, FIGURES)


def main() -> int:
    """Writes or checks; 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    now = README.read_text("utf-8")
    made = render(now)
    if args.check:
        print("README.md says what results/ say" if made == now else "README.md differs")
        return int(made != now)
    README.write_text(made, encoding="utf-8")
    print("wrote README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
