"""When requests arrive, and how long they are: synthetic processes and public production traces.

Times are seconds from the first request. Lengths of the synthetic processes follow quantiles of the
Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset, CC-BY-4.0).
"""

from __future__ import annotations

import csv
import json
import math
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]

# Share of requests, and the tokens that this share does not exceed.
# fmt: off
_SHARES = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98,
           99, 100)
_AZURE_CONV_INPUT = (2, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071,
                     1097, 1130, 1189, 1315, 1876, 2734, 4083, 4098, 4142, 14050)
_AZURE_CONV_OUTPUT = (7, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384,
                      395, 400, 411, 424, 451, 540, 601, 1000)
# fmt: on


class ArrivalsError(ValueError):
    """An arrival file or parameter that cannot be used; the message says which and why."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """N requests in order of arrival.

    Attributes:
        times: seconds since the first request, float64 [N], never decreasing.
        input_tokens: prompt tokens, int64 [N], at least 1.
        output_tokens: tokens to generate, int64 [N], at least 1.

    Raises:
        ArrivalsError: on construction, if any of that does not hold.
    """

    times: Times
    input_tokens: Lengths
    output_tokens: Lengths

    def __post_init__(self) -> None:
        n = len(self.times)
        if n == 0:
            raise ArrivalsError("arrivals: no request")
        if len(self.input_tokens) != n or len(self.output_tokens) != n:
            raise ArrivalsError("arrivals: times, input and output tokens differ in length")
        if not bool(np.isfinite(self.times).all()) or bool((np.diff(self.times) < 0).any()):
            raise ArrivalsError("arrivals: times must be finite and must not decrease")
        if int(self.input_tokens.min()) < 1 or int(self.output_tokens.min()) < 1:
            raise ArrivalsError("arrivals: a request needs at least one input and output token")

    def __len__(self) -> int:
        return len(self.times)

    @property
    def rate(self) -> float:
        """Mean requests per second; 0 for a single request or a single moment."""
        span = float(self.times[-1] - self.times[0])
        return (len(self) - 1) / span if span > 0 else 0.0

    def at_rate(self, rate: float) -> Arrivals:
        """The same requests with time stretched to a mean rate; burstiness is kept."""
        _positive("rate", rate)
        if self.rate == 0.0:
            raise ArrivalsError("arrivals: all requests come at once, they have no rate to change")
        return Arrivals(self.times * (self.rate / rate), self.input_tokens, self.output_tokens)

    def clip(self, lowest: int, highest: int) -> Arrivals:
        """The same requests with output tokens held inside [lowest, highest]."""
        if not 1 <= lowest <= highest:
            raise ArrivalsError(f"arrivals: cannot clip output tokens to [{lowest}, {highest}]")
        clipped = np.clip(self.output_tokens, lowest, highest)
        return Arrivals(self.times, self.input_tokens, clipped)

    def take(self, requests: int, seed: int) -> Arrivals:
        """Exactly `requests` requests: a random window of the trace, wrapped around its end."""
        if requests < 1:
            raise ArrivalsError(f"arrivals: cannot take {requests} requests")
        n = len(self)
        index = int(np.random.default_rng(seed).integers(n)) + np.arange(requests)
        # A lap lasts the trace plus one mean gap, so that its end and start do not coincide.
        lap = float(self.times[-1] - self.times[0]) + (1.0 / self.rate if self.rate else 0.0)
        times = self.times[index % n] + lap * (index // n)
        pick = index % n
        return Arrivals(times - times[0], self.input_tokens[pick], self.output_tokens[pick])


def poisson(rate: float, requests: int, seed: int, *, output_tokens: int | None = None) -> Arrivals:
    """Independent arrivals, `rate` per second.

    Args:
        rate: mean requests per second.
        requests: how many.
        seed: of times and lengths.
        output_tokens: a fixed output length; None draws from the Azure conversation quantiles.
    """
    _positive("rate", rate)
    if requests < 1:
        raise ArrivalsError(f"arrivals: cannot make {requests} requests")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate, requests))
    inputs = _quantile_draw(rng, _AZURE_CONV_INPUT, requests)
    outputs = _quantile_draw(rng, _AZURE_CONV_OUTPUT, requests)
    if output_tokens is not None:
        outputs = np.full(requests, output_tokens, np.int64)
    return Arrivals(times - times[0], inputs, outputs)


def _quantile_draw(rng: np.random.Generator, tokens: tuple[int, ...], size: int) -> Lengths:
    shares = np.asarray(_SHARES, np.float64) / 100.0
    return np.rint(np.interp(rng.random(size), shares, tokens)).astype(np.int64)


def load(path: str | Path, name: str = "") -> Arrivals:
    """Reads arrivals from `.npz` (array `name`), the Azure `.csv`, or a `.jsonl`.

    The latter is Mooncake's, or a router's decision log: the moments of its decisions, and one
    output token per event of a stream. Rows with an empty prompt or output are dropped: they never
    reach a decode worker, or the log does not say how long they were.

    Raises:
        ArrivalsError: unknown kind of file, missing column, unreadable or empty file.
    """
    path = Path(path)
    try:
        rows = _rows(path, name)
        rows = rows[(rows[:, 1] >= 1) & (rows[:, 2] >= 1)]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        if not len(rows):
            raise ArrivalsError("no request with input and output tokens")
        return Arrivals(
            (rows[:, 0] - rows[0, 0]) / 1e3,
            rows[:, 1].astype(np.int64),
            rows[:, 2].astype(np.int64),
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ArrivalsError(f"{path}: {error}") from error


def _rows(path: Path, name: str) -> npt.NDArray[np.float64]:
    """Milliseconds, input tokens, output tokens of every row, float64 [n, 3]."""
    if path.suffix == ".npz":
        return _npz(path, name)
    readers = {".csv": _azure, ".jsonl": _jsonl}
    # The older files of a decision log are LOG.jsonl.1 and so on.
    kind = path.with_suffix("").suffix if path.suffix[1:].isdigit() else path.suffix
    if kind not in readers:
        raise ArrivalsError("expected a name ending in .npz, .csv or .jsonl")
    return np.array(list(readers[kind](path)), np.float64).reshape(-1, 3)


def _npz(path: Path, name: str) -> npt.NDArray[np.float64]:
    with np.load(path, allow_pickle=False) as archive:
        if name not in archive.files:
            raise ArrivalsError(f"no array {name!r}, there is {', '.join(sorted(archive.files))}")
        rows = archive[name]
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iu":
        raise ArrivalsError(
            f"array {name!r}: expected integers [n, 3] (ms, input, output tokens), "
            f"got {rows.dtype} {list(rows.shape)}"
        )
    return np.asarray(rows, np.float64)


def _azure(path: Path) -> Iterator[tuple[float, int, int]]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        needed = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if not needed <= set(reader.fieldnames or ()):
            raise ArrivalsError(f"expected columns {sorted(needed)}, got {reader.fieldnames}")
        for row in reader:
            try:
                ms = _milliseconds(row["TIMESTAMP"])
                yield ms, int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, TypeError) as error:
                raise ArrivalsError(f"line {reader.line_num}: {error}") from error


def _milliseconds(text: str) -> float:
    """A moment as the 2023 files write it (seven fractional digits) or those of 2024 (a zone)."""
    whole = re.sub(r"(\.\d{6})\d+", r"\1", text)  # fromisoformat takes six digits
    moment = datetime.fromisoformat(whole)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() * 1e3


def _jsonl(path: Path) -> Iterator[tuple[float, int, int]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if "kind" in row:
                    continue  # counters of decode workers, between a log's decisions
                if "decision_us" in row:
                    yield float(row["time"]) * 1e3, int(row["prompt_tokens"]), int(row["events"])
                    continue
                yield float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
            except (ValueError, KeyError, TypeError) as error:
                raise ArrivalsError(f"line {number}: {type(error).__name__}: {error}") from error


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ArrivalsError(f"arrivals: {name} must be positive and finite, got {value}")
