"""A/B on live traffic: watches an experiment until it can tell, or a time limit.

    eldr serve ... --ab least_requests locality_band --ab-period 60
    python examples/ab_on_live_traffic.py http://127.0.0.1:30000 3600

Periods of whole minutes give the fleet to one policy at a time (switchback), so batches are never
mixed and the difference in TPOT is the one that a full roll-out would have. Exit code 0: a policy
is faster or slower with 95 % confidence; 1: no difference shown within the limit.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from eldr.cli.router_client import get_json

LOOK_SECONDS = 5.0


def line(name: str, found: dict[str, Any]) -> str:
    """One difference to the first policy, for a person."""
    tpot = found["tpot_s"]
    if tpot["estimate"] is None or tpot["relative"] is None:
        return f"{name}: {tpot['verdict']}"
    low, high = (1000 * end for end in tpot["ci95"])
    percent = 100 * tpot["relative"]
    return (
        f"{name} against {found['against']}: TPOT {1000 * tpot['estimate']:+.3f} ms "
        f"({low:+.3f} to {high:+.3f}), {percent:+.1f} %: {tpot['verdict']}"
    )


def watch(router: str, limit: float) -> bool:
    """Prints what changed; True once every difference is decided."""
    end, said = time.monotonic() + limit, ""
    while True:
        differences = get_json(router, "/eldr/experiment")["differences"]
        now = "\n".join(line(name, found) for name, found in differences.items())
        if now != said:
            print(now, flush=True)
            said = now
        verdicts = {found["tpot_s"]["verdict"] for found in differences.values()}
        if verdicts <= {"faster", "slower"}:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))


if __name__ == "__main__":
    sys.exit(0 if watch(sys.argv[1], float(sys.argv[2])) else 1)
