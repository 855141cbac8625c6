"""The published evaluation (arXiv 2607.00466, section 6), re-done in simulation.

    python -m benchmarks.paper --json > results/paper.json

Three models x two workloads x five rates against four load balancers and the domain oracle; tau;
balanced against plain K-means; signature variants; pool sizes; 40 GPUs with expert parallelism and
placements of experts on ranks; prefix caching; and the language workload once more with the
geometry and the published popularity of Qwen3-30B-A3B. Beside each figure stands the published one,
and why they differ (`benchmarks/paper_published.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import paper_published as published
from benchmarks.machine import cpu_name
from benchmarks.paper_counts import trace_of_counts
from benchmarks.policies import shared_data
from eldr.simulation.cells import ArrivalSpec, Cell
from eldr.simulation.cost import deployment
from eldr.simulation.progress import Progress
from eldr.simulation.report import LOAD_BALANCERS
from eldr.simulation.study import Result, study
from eldr.simulation.traffic import Mix
from eldr.workload.traces import load

MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "gemma-4-26b-a4b")
HARDWARE = "mi300x"
RATES = (20.0, 40.0, 60.0, 80.0, 100.0)
SECONDS = 120.0  # of arrivals, at every rate
PREFILL, DECODE = 8, 16
# Prompts per domain: the paper's task counts; WildChat's languages, English and Chinese 75 % and
# the first four 87.6 %, with the rest spread evenly.
WORKLOADS: dict[str, tuple[tuple[str, float], ...]] = {
    "task": (("legal", 3600), ("code_py", 2779), ("math", 2744), ("med", 2545)),
    "language": (
        ("lang_en", 0.50), ("lang_zh", 0.25), ("lang_ru", 0.07), ("lang_fr", 0.056),
        ("lang_es", 0.044), ("lang_de", 0.04), ("lang_ja", 0.04),
    ),
}  # fmt: skip
BAND = "locality_band:tau=0.1"
OURS = "marginal_cost"
MAIN = (*LOAD_BALANCERS, "domain", BAND, OURS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells share."""

    trace: str
    seeds: range
    scale: float
    processes: int

    def cell(self, model: str, workload: str, rate: float, **changes: Any) -> Cell:
        """8P16D of a model at a rate, or as changed."""
        tensor = changes.pop("tensor", 1)
        expert = changes.pop("expert", 1)
        prefill = changes.pop("prefill_workers", PREFILL)
        cached = changes.pop("cached", 0.0)
        trace = changes.pop("trace", self.trace)
        shares = changes.pop("shares", None) or WORKLOADS[workload]
        deployed = deployment(model, HARDWARE, tensor, expert)
        return Cell(
            trace=trace,
            mix=Mix.SAME,
            workers=changes.pop("workers", DECODE),
            cost=deployed.step_cost(load(trace).geometry),
            requests=max(200, round(rate * SECONDS * self.scale)),
            rate=rate,
            arrivals=ArrivalSpec(output_tokens=512, prompt=(4, 1024)),
            prefill=deployed.prefill(prefill, cached),
            kv_tokens=deployed.kv_tokens,
            expert_ranks=expert,
            shares=shares,
            **changes,
        )

    def run(self, cells: Sequence[Cell], policies: Sequence[str], label: str) -> list[Result]:
        """The study of these cells."""
        with Progress(label) as progress:
            return study(cells, policies, self.seeds, processes=self.processes, progress=progress)


def mean_gain(results: Sequence[Result], policy: str) -> dict[str, float]:
    """Mean over cells of the gain against each cell's best load balancer."""
    return {q: float(np.mean([r.gains[policy][q] for r in results])) for q in ("p50", "p99")}


def against(results: Sequence[Result], policy: str, base: str) -> dict[str, float]:
    """Mean over cells of the TPOT reduction against one policy, in %."""
    return {
        q: float(
            np.mean(
                [
                    100 * (1 - r.figures[policy]["tpot_ms"][q] / r.figures[base]["tpot_ms"][q])
                    for r in results
                ]
            )
        )
        for q in ("p50", "p99")
    }


def main_table(setting: Setting) -> list[dict[str, Any]]:
    rows = []
    for workload in WORKLOADS:
        for name in MODELS:
            cells = [setting.cell(name, workload, rate) for rate in RATES]
            results = setting.run(cells, MAIN, f"{name}, {workload}")
            rows.append(
                {
                    "model": name,
                    "workload": workload,
                    "gain_pct": {p: mean_gain(results, p) for p in ("domain", BAND, OURS)},
                    "against_domain_pct": {p: against(results, p, "domain") for p in (BAND, OURS)},
                    "published_pct": published.MAIN[f"{name}/{workload}"],
                    "experts_saved_pct": {
                        p: 100
                        * (
                            1
                            - np.mean([r.figures[p]["distinct_per_layer"] for r in results])
                            / np.mean(
                                [r.figures["round_robin"]["distinct_per_layer"] for r in results]
                            )
                        )
                        for p in (BAND, OURS)
                    },
                    "by_rate": [
                        {
                            "rate": r.rate,
                            "batch": r.figures["least_requests"]["batch"],
                            "tpot_ms": {p: f["tpot_ms"] for p, f in r.figures.items()},
                            "ttft_p50_ms": r.figures[BAND]["ttft_ms"]["p50"],
                        }
                        for r in results
                    ],
                }
            )
    return rows


def compare(
    setting: Setting, policies: Sequence[str], base: str, label: str, rate: float = 60.0
) -> list[dict[str, Any]]:
    """Some policies against one base, on Qwen3-30B-A3B and both workloads."""
    rows = []
    for workload in WORKLOADS:
        cells = [setting.cell("qwen3-30b-a3b", workload, rate)]
        results = setting.run(cells, (base, *policies), label)
        rows += [
            {"workload": workload, "policy": p, "gain_pct": against(results, p, base)}
            for p in policies
        ]
    return rows


def tau(setting: Setting) -> list[dict[str, Any]]:
    taus = [f"locality_band:tau={t}" for t in (0, 0.1, 0.2, 0.3)]
    return compare(setting, taus, "round_robin", "tau")


def clustering(setting: Setting) -> list[dict[str, Any]]:
    policies = [BAND, BAND + ",balanced=false", "nearest", "nearest:balanced=false"]
    return compare(setting, policies, "round_robin", "clustering")


def signature(setting: Setting) -> list[dict[str, Any]]:
    kinds = [BAND, BAND + ",idf=false"] + [
        f"{BAND},signature={s}" for s in ("sqrt", "binary", "first32", "last32")
    ]
    return compare(setting, kinds, "round_robin", "signature")


def pool(setting: Setting) -> list[dict[str, Any]]:
    """8P8D .. 8P24D, Qwen3-30B-A3B, language, 60 requests/s on 16 workers and in proportion."""
    sizes = (8, 16, 24)
    cells = [setting.cell("qwen3-30b-a3b", "language", 60.0 * n / DECODE, workers=n) for n in sizes]
    results = setting.run(cells, ("round_robin", BAND, OURS), "pool sizes")
    return [
        {
            "pool": f"8P{n}D",
            "gain_pct": {p: against([r], p, "round_robin") for p in (BAND, OURS)},
            "published_pct": published.POOL[f"8P{n}D"],
        }
        for n, r in zip(sizes, results, strict=True)
    ]


def large(setting: Setting) -> list[dict[str, Any]]:
    """40 GPUs: 2 prefill and 8 decode workers of 4, Qwen3-235B-A22B, experts sliced or on ranks."""
    rows = []
    for expert, placement in ((1, "linear"), (4, "linear"), (4, "spread"), (4, "clusters")):
        cells = [
            setting.cell(
                "qwen3-235b-a22b", "language", rate, workers=8, prefill_workers=2, tensor=4,
                expert=expert, placement=placement,
            )
            for rate in (24.0, 40.0, 56.0)
        ]  # fmt: skip
        label = f"40 GPUs, EP={expert}, {placement}"
        results = setting.run(cells, ("round_robin", BAND, OURS), label)
        rows.append(
            {
                "expert_parallel": expert,
                "placement": placement if expert > 1 else "none",
                "gain_pct": {p: against(results, p, "round_robin") for p in (BAND, OURS)},
                "tpot_p50_ms": {
                    p: float(np.mean([r.figures[p]["tpot_ms"]["p50"] for r in results]))
                    for p in ("round_robin", BAND, OURS)
                },
            }
        )
    return rows


def prefix(setting: Setting) -> list[dict[str, Any]]:
    """GPT-OSS-120B, task, 100 requests/s, with half of every prompt cached and without."""
    rows = []
    for cached in (0.0, 0.5):
        cell = setting.cell("gpt-oss-120b", "task", 100.0, cached=cached)
        (result,) = setting.run([cell], MAIN, "prefix caching")
        rows.append(
            {
                "cached": cached,
                "gain_pct": {p: result.gains[p] for p in (BAND, OURS)},
                "ttft_p50_ms": result.figures[BAND]["ttft_ms"]["p50"],
            }
        )
    return rows


def counts(setting: Setting) -> list[dict[str, Any]]:
    """Qwen3-30B-A3B's own geometry and popularity by language, tokens drawn independently."""
    path = shared_data() / "qwen3_30b_a3b_mgsm_counts.npz"
    if not path.exists():
        print(f"paper: no {path}, part `counts` is left out", file=sys.stderr)
        return []
    with np.load(path, allow_pickle=False) as file:
        made = trace_of_counts(file["counts"], tuple(map(str, file["langs"])), 8)
    shares = (("en", 0.50), ("zh", 0.25), ("fr", 0.07), ("es", 0.056), ("de", 0.044),
              ("ja", 0.04), ("bn", 0.02), ("sw", 0.02))  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        made.save(file.name)
        cells = [
            setting.cell("qwen3-30b-a3b", "language", rate, trace=file.name, shares=shares)
            for rate in RATES
        ]
        results = setting.run(cells, MAIN, "Qwen3 counts")
    return [
        {
            "workload": "language",
            "gain_pct": {p: mean_gain(results, p) for p in ("domain", BAND, OURS)},
            "published_pct": published.MAIN["qwen3-30b-a3b/language"],
            "distinct_per_layer": {
                p: float(np.mean([r.figures[p]["distinct_per_layer"] for r in results]))
                for p in ("round_robin", "domain", BAND, OURS)
            },
        }
    ]


PARTS = {
    "main": main_table,
    "tau": tau,
    "clustering": clustering,
    "signature": signature,
    "pool": pool,
    "large": large,
    "prefix": prefix,
    "counts": counts,
}


def markdown(out: dict[str, Any]) -> str:
    """The main table, and the other parts as lists."""
    lines = [
        "| model, workload | published | locality_band | marginal_cost | domain oracle |",
        "|---|---|---|---|---|",
    ]
    for row in out.get("main", []):
        p50, p99 = row["published_pct"]
        gain = row["gain_pct"]
        lines.append(
            f"| {row['model']}, {row['workload']} | {p50:+.1f} / {p99:+.1f} | "
            + " | ".join(pair(gain[p]) for p in (BAND, OURS, "domain"))
            + " |"
        )
    for part in PARTS:
        if part not in out:
            continue
        lines += ["", f"**{part}**. Published: {published.TEXT[part]}.", published.WHY[part]]
        if part == "main":
            continue
        for row in out[part]:
            head = ", ".join(
                f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
                if k not in ("gain_pct", "published_pct") and not isinstance(v, dict)
            )
            gain = row["gain_pct"]
            shown = (
                pair(gain)
                if "p50" in gain
                else ", ".join(f"{p} {pair(g)}" for p, g in gain.items())
            )
            p50, p99 = row.get("published_pct", (0.0, 0.0))
            beside = f" (published {p50:+.1f} / {p99:+.1f})" if "published_pct" in row else ""
            lines.append(f"- {head}: {shown}{beside}")
    return "\n".join(lines)


def pair(gain: dict[str, float]) -> str:
    return f"{gain['p50']:+.1f} / {gain['p99']:+.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--trace", help="default: tiny_traces.npz of the shared data")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 120 s per rate")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    trace = args.trace or str(shared_data() / "tiny_traces.npz")
    if not os.path.exists(trace):
        print(f"paper: no trace {trace}; set ELDR_SHARED_DATA or give --trace", file=sys.stderr)
        return 3
    setting = Setting(trace, range(args.seeds), args.scale, args.processes)
    started = time.time()
    out: dict[str, Any] = {
        "command": "python -m benchmarks.paper " + " ".join(sys.argv[1:]),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
        "simulated": True,
        "published": published.TEXT,
        "why": published.WHY,
        **{part: PARTS[part](setting) for part in args.part or PARTS},
        "seconds": time.time() - started,
    }
    print(json.dumps(out) if args.json else markdown(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
