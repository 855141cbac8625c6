"""A partition from your own traffic: no recording run, only the router's decision log.

    eldr serve ... --decision-log decisions.jsonl --decision-log-signatures
    python calibrate_from_log.py decisions.jsonl http://PREFILL:8100 OUT.safetensors DECODE_URL ...

The log holds the requests as they came, so frequent kinds weigh as much as they do in your traffic.
"""

from __future__ import annotations

import json
import sys
import urllib.request

import numpy as np

from eldr.geometry import Geometry
from eldr.routing import Recorded, fit_partition
from eldr.serving.decision_log import read_decisions
from eldr.signature import SignatureError, decode


def recorded(log: str, geometry: Geometry) -> Recorded:
    """The log's usable signatures."""
    found, broken = [], 0
    for row in read_decisions(log):
        try:
            if "signature" in row:
                found.append(decode(row["signature"], geometry))
        except SignatureError:
            broken += 1  # a request of another model, or cut off
    print(f"{len(found)} signatures, {broken} unusable", file=sys.stderr)
    if not found:
        raise SystemExit(f"{log}: no signatures; serve with --decision-log-signatures")
    counts = np.stack([signature.counts for signature in found])
    tokens = np.array([signature.tokens for signature in found], np.int32)
    coverage = np.array([signature.coverage for signature in found], np.float32)
    return Recorded(counts, tokens, coverage, geometry)


def main(log: str, prefill: str, output: str, workers: list[str]) -> None:
    """Asks a prefill worker for the geometry, fits one centroid per decode worker, and saves."""
    with urllib.request.urlopen(f"{prefill}/eldr/info") as answer:
        shape = json.load(answer)["geometry"]
    geometry = Geometry(shape["layers"], shape["experts"], shape["top_k"])
    partition = fit_partition(recorded(log, geometry), workers)
    partition.save(output)
    print(f"wrote {output}: {partition.metrics}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
