"""How requests are treated, and reading frozen dataclasses from plain values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from eldr.routing.partition import PartitionError, load_partition
from eldr.routing.policies import POLICIES, make_policy
from eldr.routing.policies.locality import LocalityBand
from eldr.serving.config import ConfigError

T = TypeVar("T")

_POSITIVE = ("attempts", "request_timeout", "first_byte_timeout", "idle_timeout", "max_body")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is treated; durations are seconds, sizes bytes.

    Attributes:
        unsplittable: batches of prompts, prompt logprobs, beam search: "whole" on a decode worker
            or "fail".
        several_choices: n or best_of above one: "split", "whole" or "fail".
        attempts: tries per leg.
        retry_budget: retries that each request earns for all.
        request_timeout: longest life of a request.
        first_byte_timeout, idle_timeout: longest wait for a worker's first byte, and for the next.
        max_body: largest request body.
        worker_headers: tell clients which workers served them, and why.
    """

    unsplittable: Literal["whole", "fail"] = "whole"
    several_choices: Literal["split", "whole", "fail"] = "split"
    attempts: int = 5
    retry_budget: float = 0.5
    request_timeout: float = 1800.0
    first_byte_timeout: float = 300.0
    idle_timeout: float = 120.0
    max_body: int = 64 * 2**20
    worker_headers: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)!r}")
        if self.retry_budget < 0:
            raise ConfigError(f"retry_budget: must not be negative, got {self.retry_budget!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """How decode workers are chosen.

    Attributes:
        policy: name of an `eldr.routing` policy.
        partition: fitted partition file, for policies that need one; wherever decisions are made.
        tau: width of the locality band.
        min_coverage: signatures that cover a smaller share of the prompt are not used.
        trust: in [0, 1], how far measured expert use corrects a decider's own view; above 0 it
            shows the requests of other deciders.
        seed: of the policies' draws.
        decisions: how many of the last decisions are kept.
    """

    policy: str = "marginal_cost"
    partition: str = ""
    tau: float = 0.1
    min_coverage: float = 0.5
    trust: float = 0.5
    seed: int = 0
    decisions: int = 1000

    def __post_init__(self) -> None:
        if self.policy not in POLICIES or self.policy == "domain":
            known = ", ".join(name for name in POLICIES if name != "domain")
            raise ConfigError(f"routing.policy: no policy {self.policy!r}; there are {known}")
        for name in ("tau", "min_coverage", "trust"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"routing.{name}: must be in [0, 1], got {value}")
        if self.decisions < 1:
            raise ConfigError(f"routing.decisions: must be at least 1, got {self.decisions}")
        by_centroid = isinstance(make_policy(self.policy), LocalityBand)
        if by_centroid != bool(self.partition):
            verb = "needs a partition file" if by_centroid else "uses no partition"
            raise ConfigError(f"routing: policy {self.policy} {verb}, got {self.partition!r}")

    def check_files(self) -> None:
        """Raises ConfigError if the partition cannot be read here."""
        if self.partition:
            try:
                load_partition(self.partition)
            except PartitionError as error:
                raise ConfigError(f"routing.partition: {error}") from error


def read_file(path: str) -> dict[str, Any]:
    """The values of a JSON file (by its name) or a YAML file.

    Raises:
        ConfigError: unreadable, or not a table.
    """
    decode = msgspec.json.decode if path.endswith(".json") else msgspec.yaml.decode
    try:
        values = decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a table of options")
    return values


def build(kind: type[T], values: Any, where: str = "") -> T:
    """A dataclass from plain values; one that is built already passes.

    Args:
        kind: of the result.
        values: a mapping.
        where: prefix of names in messages, such as "decode.".

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, out of range.
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where[:-1]}: expected a table of options, got {values!r}")
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {where}{close[0]}?" if close else f"; there are {known}"
            raise ConfigError(f"{where}{name}: no such option{hint}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where or 'application'}: {error}") from error
