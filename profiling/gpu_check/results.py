"""What a run found, as JSON data and as a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from profiling.gpu_check.experts import ExpertCost
from profiling.gpu_check.parity import Verdict
from profiling.gpu_check.speed import PEERS, Timing

# Microseconds that the kernels should need at the first model's shape.
GOALS = {"accumulate_hits": {None: 10.0}, "decide": {1: 8.0, 64: 25.0}}
GOAL_MODEL = "Qwen3-30B-A3B"


@dataclass(slots=True)
class Results:
    """Filled stage by stage; complete at any time, so that a run cut short still reports."""

    command: str
    machine: dict[str, object]
    date: str
    builds: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    copy_bytes_per_s: float | None = None
    timings: list[Timing] = field(default_factory=list)
    experts: list[ExpertCost] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Verdict]:
        """The comparisons and audits that do not hold."""
        return [v for v in self.verdicts if v.wrong]

    def goals(self) -> list[dict[str, object]]:
        """The goals, with the fastest backend's time where it was measured."""
        found = []
        for op, cases in GOALS.items():
            for requests, goal in cases.items():
                best = _fastest(self.timings, op, requests)
                found.append(
                    {
                        "what": op if requests is None else f"{op} R={requests}",
                        "model": GOAL_MODEL, "goal_us": goal, "us": best and best[1],
                        "backend": best and best[0], "met": best is not None and best[1] <= goal,
                    }
                )  # fmt: skip
        return found

    def as_dict(self) -> dict[str, object]:
        """The JSON object."""
        return {
            "v": 1, "command": self.command, "machine": self.machine, "date": self.date,
            "seconds": round(self.seconds, 1), "holds": not self.failures, "builds": self.builds,
            "checks": [v.as_dict() for v in self.verdicts],
            "copy_bytes_per_s": self.copy_bytes_per_s, "goals": self.goals(),
            "timings": [t.as_dict() for t in self.timings],
            "experts": [e.as_dict() for e in self.experts], "left_out": self.left_out,
        }  # fmt: skip


def _fastest(timings: list[Timing], op: str, requests: int | None) -> tuple[str, float] | None:
    for timing in timings:
        right = requests is None or timing.case.startswith(f"R={requests} ")
        ours = {name: s.median for name, s in timing.samples.items() if name not in PEERS}
        if timing.op == op and timing.model == GOAL_MODEL and right and ours:
            return min(ours.items(), key=lambda item: item[1])
    return None


def file_name(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "gpu"


def markdown(results: Results) -> str:
    """The page beside the JSON file."""
    return "\n".join([*_head(results), *_checks(results), *_times(results), *_cost(results)]) + "\n"


def _head(r: Results) -> Iterator[str]:
    yield f"# GPU check: {r.machine.get('device', 'unknown device')}"
    yield ""
    yield f"`{r.command}`, {r.date}, {r.seconds:.0f} s. " + ", ".join(
        f"{key} {value}" for key, value in r.machine.items() if key != "device"
    )
    yield ""
    for name, state in r.builds.items():
        yield f"* build of {name}: {state}"
    if r.copy_bytes_per_s:
        yield f"* copy bandwidth: {r.copy_bytes_per_s / 1e12:.2f} TB/s (read + written)"
    for what in r.left_out:
        yield f"* left out: {what}"


def _checks(r: Results) -> Iterator[str]:
    yield ""
    yield "## Checks"
    yield ""
    yield "| op | backend | held | failed |"
    yield "|---|---|---|---|"
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in r.verdicts:
        groups.setdefault((verdict.op, verdict.backend), []).append(verdict)
    for (op, backend), verdicts in groups.items():
        bad = [f"{v.case}: {v.wrong}" for v in verdicts if v.wrong]
        yield f"| {op} | {backend} | {len(verdicts) - len(bad)} | {'; '.join(bad) or '-'} |"


def _times(r: Results) -> Iterator[str]:
    names = list(dict.fromkeys(name for t in r.timings for name in t.samples))
    yield ""
    yield "## Times"
    yield ""
    yield "Microseconds (median; e = eager) and, in brackets, GB/s of the bytes that have to move."
    yield "Inputs are not in the cache."
    yield ""
    yield f"| op | model | case | {' | '.join(names)} |"
    yield f"|---|---|---|{'---|' * len(names)}"
    for t in r.timings:
        cells = [_cell(t, name) for name in names]
        yield f"| {t.op} | {t.model} | {t.case} | {' | '.join(cells)} |"
    yield ""
    yield "| goal | us | backend | met |"
    yield "|---|---|---|---|"
    for g in r.goals():
        us: Any = g["us"]
        measured = "not measured" if us is None else f"{us:.1f}"
        met = "yes" if g["met"] else "no"
        yield f"| {g['what']} <= {g['goal_us']} us | {measured} | {g['backend'] or '-'} | {met} |"


def _cell(timing: Timing, name: str) -> str:
    if name not in timing.samples:
        return timing.left_out.get(name, "-")
    sample = timing.samples[name]
    mark = " e" if sample.how == "eager" else ""
    return f"{sample.median:.1f}{mark} ({timing.bytes / sample.median / 1000:.0f})"


def _cost(r: Results) -> Iterator[str]:
    yield ""
    yield "## One fused-MoE layer against distinct experts"
    yield ""
    head = ("model", "layer", "tokens", "t0 us", "us per expert", "GB/s", "us by distinct experts")
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|---|---|---|---|"
    for e in r.experts:
        speed = "-" if e.gb_per_s is None else f"{e.gb_per_s:.0f}"
        points = ", ".join(f"{d}: {s.median:.0f}" for d, s in sorted(e.samples.items()))
        yield (
            f"| {e.model} | {e.layer} | {e.batch} | {e.base_us:.1f} | {e.expert_us:.2f} | {speed} "
            f"| {points} |"
        )
