"""What the smaller wire forms of a signature save, and what they lose, on recorded routing.

    python -m benchmarks.wire_forms --json > results/wire_forms.json

A fleet in steady state takes the exact signatures; before each of them the same request is tried
with the form's signature. `agree` is the share of equal choices, `regret` what the form's choice
costs more than the best one, by the exact scores (marginal_cost: relative; locality_band: cosine).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import cpu_name
from benchmarks.policies import shared_data
from eldr.geometry import Geometry
from eldr.routing import Fleet, Recorded, RouteRequest, Worker, fit_partition, make_policy
from eldr.signature import Signature, decode, encode
from eldr.workload.traces import load

FORMS: tuple[tuple[str, int], ...] = (
    ("exact", 1), ("8bit", 1), ("sampled", 256), ("sampled", 128), ("sampled", 64), ("sampled", 32),
)  # fmt: skip
WORKERS, BATCH = 8, 20


def prompts(path: Path) -> tuple[Geometry, list[Signature]]:
    """Signatures of a trace's prompts."""
    trace = load(path)
    tokens = trace.cuts - trace.offsets[:-1]
    made = [Signature(c, int(n)) for c, n in zip(trace.prompt_counts, tokens, strict=True)]
    return trace.geometry, made


def cosine(a: Signature, b: Signature) -> float:
    """Of the raw counts."""
    x, y = a.counts.reshape(-1).astype(np.float64), b.counts.reshape(-1).astype(np.float64)
    return float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12)


def fleet(policy: str, geometry: Geometry, fitted: list[Signature], seed: int) -> Fleet:
    """WORKERS workers; the partition, if one is needed, is fitted to `fitted`."""
    names = [f"d{i}" for i in range(WORKERS)]
    options: dict[str, Any] = {}
    if policy == "locality_band":
        recorded = Recorded(
            np.stack([s.counts for s in fitted]).astype(np.uint32),
            np.array([s.tokens for s in fitted], np.int32),
            np.ones(len(fitted), np.float32),
            geometry,
        )
        options["partition"] = fit_partition(recorded, names, restarts=1, seed=seed)
    return Fleet(make_policy(policy, **options), map(Worker, names), geometry=geometry)


def decisions(
    policy: str, geometry: Geometry, pairs: list[tuple[Signature, Signature]], count: int, seed: int
) -> tuple[float, float]:
    """Share of equal choices, and mean regret, over `count` decisions after a warm-up."""
    rng = np.random.default_rng(seed)
    half = rng.permutation(len(pairs))
    cut = len(pairs) // 2
    served = half[cut:]
    held = fleet(policy, geometry, [pairs[i][0] for i in half[:cut]], seed)
    running: list[str] = []
    agree, regret = [], []
    for i in range(count + WORKERS * BATCH):
        exact, other = pairs[int(rng.choice(served))]
        if i >= WORKERS * BATCH:
            held.release(running.pop(int(rng.integers(len(running)))))
            tried = held.reserve(RouteRequest("trial", other, prompt_tokens=exact.tokens))
            held.release("trial")
        running.append(str(i))
        taken = held.reserve(RouteRequest(str(i), exact, prompt_tokens=exact.tokens))
        if i >= WORKERS * BATCH:
            assert taken.choice.scores is not None  # both policies score
            scores = dict(zip(taken.candidates.tolist(), taken.choice.scores, strict=True))
            chosen, best = scores[tried.choice.slot], scores[taken.choice.slot]
            agree.append(tried.worker.name == taken.worker.name)
            lower = policy == "marginal_cost"
            regret.append(float(chosen / best - 1 if lower else max(best - chosen, 0.0)))
    return float(np.mean(agree)), float(np.mean(regret))


def measure(
    name: str, geometry: Geometry, made: list[Signature], count: int
) -> list[dict[str, Any]]:
    """One row per form."""
    rows = []
    for form, sample in FORMS:
        wires = [encode(s, geometry, form, sample) for s in made]
        read = [decode(w, geometry) for w in wires]
        near = [cosine(a, b) for a, b in zip(made, read, strict=True)]
        row: dict[str, Any] = {
            "trace": name,
            "form": form,
            "sample": sample if form == "sampled" else None,
            "changed": float(np.mean([w["v"] == 2 for w in wires])),
            "payload_bytes": float(np.mean([len(json.dumps(w)) for w in wires])),
            "cosine_mean": float(np.mean(near)),
            "cosine_min": float(np.min(near)),
        }
        if len(made) >= 4 * WORKERS:
            for policy in ("marginal_cost", "locality_band"):
                same, regret = decisions(policy, geometry, list(zip(made, read, strict=True)),
                                         count, seed=1)  # fmt: skip
                row[policy] = {"agree": same, "regret": regret}
        rows.append(row)
    return rows


def languages(path: Path) -> tuple[Geometry, list[Signature]]:
    """Qwen3-30B-A3B's counts of eight long texts, as if each were one prompt."""
    with np.load(path) as file:
        counts = file["counts"].astype(np.uint32)
    geometry = Geometry(counts.shape[1], counts.shape[2], 8)
    hits = counts.sum(axis=2, dtype=np.int64).max(axis=1)
    tokens = np.maximum((hits + 7) // 8, counts.max(axis=(1, 2)).astype(np.int64))
    return geometry, [Signature(c, int(n)) for c, n in zip(counts, tokens, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = shared_data()
    rows: list[dict[str, Any]] = []
    for file, read in (
        ("tiny_traces.npz", prompts),
        ("deepseek_v2_lite_topk.npz", prompts),
        ("qwen3_30b_a3b_mgsm_counts.npz", languages),
    ):
        if not (data / file).exists():
            print(f"wire_forms: no {data / file}; set ELDR_SHARED_DATA", file=sys.stderr)
            return 3
        rows += measure(Path(file).stem, *read(data / file), args.decisions)
    if args.json:
        report = {
            "command": " ".join(["python -m benchmarks.wire_forms", *sys.argv[1:]]),
            "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
            "date": time.strftime("%Y-%m-%d"),
            "fleet": f"{WORKERS} workers, {BATCH} running requests each",
            "rows": rows,
        }
        print(json.dumps(report))
    else:
        for row in rows:
            print("  ".join(f"{k} {v}" for k, v in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
