"""What `eldr doctor` finds out about workers over HTTP: reachable, patched, equal, in time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eldr.cli.findings import OK, PROBLEM, UNKNOWN, Finding
from eldr.cli.router_client import RouterError, get
from eldr.engine.patching import PatchError, shipped_series

KEY_VARIABLE = "ELDR_SERVE_WORKER_KEY"
# HTTP dates have whole seconds; more than this is a clock, not a rounding.
MOST_SKEW_SECONDS = 2.0
_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker's answers.

    Attributes:
        info: of /eldr/info, None without.
        skew: its clock minus ours, seconds, as far as it exceeds what was uncertain; None unknown.
    """

    role: str
    url: str
    info: dict[str, Any] | None = None
    skew: float | None = None


def workers(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[Finding]:
    """Every check of these workers."""
    seen = []
    for role, url in [*(("prefill", u) for u in prefill), *(("decode", u) for u in decode)]:
        found, worker = look(role, url.rstrip("/"))
        yield from found
        if worker is not None:
            seen.append(worker)
    yield from compare(seen)


def look(role: str, url: str) -> tuple[list[Finding], Seen | None]:
    """Findings about one worker, and what later comparisons need; None if it is unreachable."""
    name = f"{role} {url}"
    key = os.environ.get(KEY_VARIABLE, "")
    before = time.time()
    try:
        _, date = get(url + "/v1/models", key=key, timeout=_TIMEOUT)
    except RouterError as error:
        fix = f"start it, correct the URL, or set {KEY_VARIABLE} if it asks for a key"
        return [Finding(name, PROBLEM, str(error), fix)], None
    skew = _skew(before, time.time(), date)
    out = [Finding(name, OK, "answers /v1/models"), _clock(name, skew)]
    try:
        info = json.loads(get(url + "/eldr/info", key=key, timeout=_TIMEOUT)[0])
        finding = _role(name, role, info)
    except (RouterError, ValueError, KeyError, TypeError) as error:
        fix = (
            "run eldr patch apply there and start it with "
            f'--additional-config \'{{"eldr": {{"role": "{role}"}}}}\''
        )
        detail = f"no ELDR: {error if isinstance(error, RouterError) else type(error).__name__}"
        return [*out, Finding(f"{name} info", PROBLEM, detail, fix)], Seen(role, url, None, skew)
    return [*out, finding], Seen(role, url, info, skew)


def _skew(before: float, after: float, date: float | None) -> float | None:
    """The server wrote its clock, cut to seconds, at some moment between the two."""
    if date is None:
        return None
    if date + 1.0 < before:
        return date + 1.0 - before
    return max(0.0, date - after)


def _clock(name: str, skew: float | None) -> Finding:
    check = f"{name} clock"
    if skew is None:
        return Finding(check, UNKNOWN, "its answers have no Date", "compare `date` on both by hand")
    detail = f"at least {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    if abs(skew) > MOST_SKEW_SECONDS:
        fix = "synchronise the clocks (chrony); logs and traces cannot be joined otherwise"
        return Finding(check, PROBLEM, detail, fix)
    return Finding(check, OK, f"within {MOST_SKEW_SECONDS:g} s of this machine")


def _role(name: str, role: str, info: dict[str, Any]) -> Finding:
    shape = info["geometry"]
    detail = (
        f"role {info['role']}, vllm {info['vllm']}, series {info['series']}, "
        f"{shape['layers']} layers x {shape['experts']} experts, top {shape['top_k']} "
        f"({shape['digest']})"
    )
    allowed = {role} if role == "prefill" else {role, "both"}
    if info["role"] not in allowed:
        return Finding(f"{name} info", PROBLEM, detail, f"give it with --{info['role']}")
    return Finding(f"{name} info", OK, detail)


def compare(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Whether all workers serve one model, with one series, and that of this eldr."""
    known = [worker for worker in seen if worker.info is not None]
    if not known:
        return
    geometries = {w.url: str(w.info["geometry"]["digest"]) for w in known if w.info}
    yield _equal("geometry", geometries, "serve one model with all workers of a fleet")
    models = {w.url: str(w.info.get("model", "")) for w in known if w.info}
    yield _equal("model", models, "start all workers with the same --model")
    series = {w.url: str(w.info["series"]) for w in known if w.info}
    same = _equal("series", series, "run eldr patch apply of one eldr release on every worker")
    yield same
    if same.status == OK:
        yield _ours(next(iter(series.values())))


def _equal(check: str, values: dict[str, str], fix: str) -> Finding:
    groups: dict[str, list[str]] = {}
    for url, value in values.items():
        groups.setdefault(value, []).append(url)
    if len(groups) == 1:
        return Finding(check, OK, f"{next(iter(groups))} on {len(values)} workers")
    listed = "; ".join(f"{value}: {', '.join(urls)}" for value, urls in sorted(groups.items()))
    return Finding(check, PROBLEM, listed, fix)


def _ours(series: str) -> Finding:
    try:
        ours = shipped_series()
    except PatchError as error:
        return Finding("series here", UNKNOWN, str(error), "install eldr again, with its patches")
    if series == ours:
        return Finding("series here", OK, f"{ours}, as on the workers")
    fix = "use one eldr release for router and engines, and run its eldr patch apply there"
    return Finding("series here", PROBLEM, f"{ours}, the workers hold {series}", fix)
