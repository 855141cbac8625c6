"""Audit of a large synthetic capture: wall time and peak memory, in a process of its own.

    python -m benchmarks.audit [--gigabytes 1.0] [--json]

Steps that replay CUDA graphs, as in production, or with --eager the hard kind: every layer has an
ELDR range and two launches of its own. Bars: at most 60 s and 1 GB for a 1 GB export, and the
`.item()` planted near its end is found.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import cpu_name
from profiling import schema
from profiling.fixture import Engine, Scenario
from profiling.recorder import Recorder

BAR_SECONDS, BAR_BYTES = 60.0, 10**9
_LAYERS = 48


class Planted(Engine):
    """Clean but for one hidden read in a chosen step."""

    fault = -1

    def accumulate(self, number: int) -> None:
        """As ever, and once more."""
        super().accumulate(number)
        if number == self.fault:
            self.r.item()


def write_capture(path: Path, size: int, graphs: bool) -> None:
    """Writes an export of at least `size` bytes."""
    recorder, number = Recorder(), 0
    scenario = Scenario(graphs=graphs, layers=_LAYERS, canary_every=128)
    engine = Planted(recorder, scenario)
    recorder.create_domain()
    db = sqlite3.connect(path)
    db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
    recorder.describe()
    if graphs:
        engine.capture_graph()
    while engine.fault < 0:
        if path.stat().st_size >= size:
            engine.fault = number + 3  # the last batch has the fault
        for _ in range(500):
            engine.step(number)
            number += 1
        recorder.flush(db)
    db.executescript(schema.create_statement("StringIds"))
    strings = [(key, text) for text, key in recorder.strings.items()]
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", strings)
    db.commit()
    db.close()


def measure(path: Path) -> dict[str, object]:
    """Audits in a child process."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "profiling.audit", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    verdict = json.loads(done.stdout)
    waits = [f for f in verdict["findings"] if f["kind"] == "wait"]
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_bytes": usage.ru_maxrss * 1024,
        "verdict": verdict["verdict"],
        "waits_found": len(waits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--eager", action="store_true", help="launch by launch, no CUDA graphs")
    parser.add_argument("--keep", type=Path, help="keep the export here, and use it if it is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "large.sqlite"
        if not path.exists():
            write_capture(path, int(args.gigabytes * 1e9), not args.eager)
        found = measure(path)
        rows = {}
        with sqlite3.connect(path) as db:
            for table in (
                "CUPTI_ACTIVITY_KIND_KERNEL",
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                "NVTX_EVENTS",
            ):
                rows[table] = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        size = path.stat().st_size
    result = {
        "command": " ".join(["python -m benchmarks.audit", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
        "export_bytes": size,
        "rows": rows,
        **found,
        "bars": {"seconds": BAR_SECONDS, "peak_bytes": BAR_BYTES},
        "holds": found["seconds"] <= BAR_SECONDS
        and found["peak_bytes"] <= BAR_BYTES
        and found["waits_found"] == 1,
    }
    print(json.dumps(result, indent=None if args.json else 2))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
