"""Are signatures exact whatever vLLM does to its KV cache? Random traffic through real engines.

    python -m benchmarks.churn --requests 2000 --seed 0 --json

One engine per process and case: six model families, both model runners, several block sizes,
chunk sizes and pool sizes, with and without a connector that brings evicted blocks back, ids copied
inside the forward (V2, as beside CUDA graphs) and referred to (V1, as on a CPU). Every
signature is compared with an independent log of routed ids per KV slot (and, on runner V2, with
vLLM's own routed-experts output); every output with the same traffic when ELDR is off.
Exit code 1 if anything differs. Needs the patched vLLM; no GPU: runner V2 is interpreted.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import cpu_name
from eldr.engine.testing import families
from eldr.engine.testing.churn import Case

# Block size, chunk, pool blocks: short and long chunks that end inside blocks and on their
# borders; pools that hold little more than the longest request.
_SHAPES = ((32, 200, 18), (32, 72, 30), (64, 256, 12), (96, 100, 10), (128, 150, 8), (256, 300, 6))
_TIMEOUT_S = 3600
ROOT = Path(__file__).resolve().parent.parent
_SOURCES = (("eldr/engine", "*.py"), ("patches", "*.patch"))


def cases(requests: int, seed: int) -> Iterator[Case]:
    """The engines among which the requests are shared; V2, interpreted, gets fewer."""
    plain = [(family, runner) for family in families.MOE for runner in ("v1", "v2")]
    weights = [3 if runner == "v1" else 1 for _, runner in plain]
    shared = requests * 9 // 10
    for index, ((family, runner), weight) in enumerate(zip(plain, weights, strict=True)):
        block_size, chunk, blocks = _SHAPES[index % len(_SHAPES)]
        share = max(1, shared * weight // sum(weights))
        copies = runner == "v2"
        yield Case(family, runner, share, seed + index, block_size, chunk, blocks, copies=copies)
    rest, seed = max(1, (requests - shared) // 10), seed + 100
    yield Case("qwen3_moe", "v1", 3 * rest, seed, connector=True)
    yield Case("qwen3_moe", "v1", 3 * rest, seed + 1, connector=True, store=True)
    yield Case("mixtral", "v2", rest, seed + 2, connector=True, store=True, copies=True)
    yield Case("qwen3_moe", "v1", 3 * rest, seed + 3, speculate=3)


def run(case: Case) -> dict:
    """One case in a process of its own."""
    command = [sys.executable, "-m", "eldr.engine.testing.churn", json.dumps(asdict(case))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{case}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    result: dict = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summary(results: list[dict]) -> dict[str, object]:
    """The sums over all engines, and each engine's own line."""
    kinds: Counter[str] = Counter()
    for result in results:
        kinds.update(result["by_case"])
    return {
        "requests": sum(r["requests"] for r in results),
        "compared": sum(r["compared"] for r in results),
        "mismatches": sum(r["mismatches"] for r in results),
        "coverage_lies": sum(r["coverage_lies"] for r in results),
        "outputs_equal": all(r["outputs_equal"] for r in results),
        "by_case": dict(sorted(kinds.items())),
        "engines": results,
    }


def code() -> str:
    """Digest of the sources that a result depends on: results of others are not gone on from."""
    found = hashlib.sha256()
    for folder, kind in _SOURCES:
        for path in sorted(p for p in (ROOT / folder).rglob(kind) if p.is_file()):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def conditions() -> dict[str, object]:
    """How these figures came about."""
    return {
        "command": shlex.join(["python", "-m", "benchmarks.churn", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "code": code(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
    }


def _same(case: Case, result: dict) -> bool:
    return all(result.get(name) == value for name, value in asdict(case).items())


def _known(out: Path | None, chosen: list[Case]) -> list[dict]:
    """Results of these cases that an earlier, interrupted run left in `out`."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    if found["conditions"].get("code") != code():
        return []
    engines = found["engines"]
    return [found for found in engines if any(_same(case, found) for case in chosen)]


def _found(results: list[dict], left: int) -> dict[str, object]:
    return summary(results) | {"cases_left": left, "conditions": conditions()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=families.MOE, help="only this one")
    parser.add_argument("--runner", choices=("v1", "v2"), help="only this one")
    parser.add_argument("--processes", type=int, default=1, help="engines at a time")
    parser.add_argument(
        "--out", type=Path, help="also write the result here, case by case, and go on from it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    chosen = [
        case
        for case in cases(args.requests, args.seed)
        if args.family in (None, case.family) and args.runner in (None, case.runner)
    ]
    results = _known(args.out, chosen)
    left = [case for case in chosen if all(not _same(case, r) for r in results)]
    failed = []
    found = _found(results, len(left))
    with ThreadPoolExecutor(args.processes) as pool:
        for done in as_completed([pool.submit(run, case) for case in left]):
            if (error := done.exception()) is not None:
                failed.append(error)
                print(error, file=sys.stderr)
                continue
            results.append(done.result())
            print({k: v for k, v in results[-1].items() if k != "by_case"}, file=sys.stderr)
            found = _found(results, len(chosen) - len(results))
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{k}: {v}" for k, v in found.items() if k != "engines"))
    exact = found["mismatches"] == found["coverage_lies"] == 0 and found["outputs_equal"]
    good = exact and not failed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
