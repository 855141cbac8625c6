"""Time of one decode step as a linear function of what the step reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per decode step: base + expert * D + kv * KV + request * n.

    D is the number of distinct experts read, summed over layers, KV the KV tokens read and n the
    batch size. Only ratios matter to a choice, so any unit does.

    Attributes:
        base: seconds of an empty step.
        expert: seconds per distinct expert and layer.
        kv: seconds per KV token.
        request: seconds per request in the batch.
    """

    base: float
    expert: float
    kv: float = 0.0
    request: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"step cost: {field.name} must be finite and >= 0, got {value}")

    def seconds(self, distinct: float, kv_tokens: float, requests: float) -> float:
        """Time of one step."""
        return self.base + self.expert * distinct + self.kv * kv_tokens + self.request * requests
