"""What the demo runs, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "eldr-tiny-moe"
LOAD_BALANCERS = ("round_robin", "least_requests")
DEFAULT_POLICIES = (*LOAD_BALANCERS, "locality_band", "marginal_cost")
MAX_MODEL_LEN = 512  # tokens; the prompts have about 192


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Sizes and paths of one demo run.

    Attributes:
        out: folder for logs, recorded signatures, partition, plots and summary.json.
        requests: held-out requests replayed once per policy.
        concurrency: requests in flight; a finished one lets the next of the fixed order start.
        decode_workers: vLLM decode processes (one prefill process serves them).
        policies: router policies to compare, in the order in which they run.
        tau: width of the locality band, in cosine similarity.
        output_checks: greedy requests compared with undisaggregated serving.
        min_tokens, max_tokens: bounds of the decode lengths, drawn once for all policies.
        start_timeout: seconds that a worker may take to come up.
        seed: of the request order, the decode lengths and the sampling.
    """

    out: Path = Path("demo-out")
    requests: int = 240
    concurrency: int = 48
    decode_workers: int = 3
    policies: tuple[str, ...] = DEFAULT_POLICIES
    tau: float = 0.1
    output_checks: int = 24
    min_tokens: int = 128
    max_tokens: int = 300
    start_timeout: float = 600.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "decode_workers", "output_checks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 < self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"decode lengths: need 1 < min <= max, got {self.min_tokens}..{self.max_tokens}"
            )
        if not self.policies:
            raise ValueError("policies: name at least one")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies: named twice in {', '.join(self.policies)}")
