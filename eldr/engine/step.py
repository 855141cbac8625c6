"""What the scheduler's hook tells the worker's with each step, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eldr.engine.hoststore import Move, StoreTotals
from eldr.geometry import Geometry
from eldr.signature import Counts


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """A prompt whose last token is computed in this step and that wants a signature.

    Attributes:
        request: vLLM's request id.
        blocks: KV blocks, in prompt order, whose rows hold exactly the prompt's tokens.
        fills: prompt tokens in each of `blocks`.
        tokens: prompt tokens of the request, those of uncovered blocks included.
    """

    request: str
    blocks: tuple[int, ...]
    fills: tuple[int, ...]
    tokens: int


@dataclass(slots=True)  # not frozen: one is made per step, and freezing triples its cost
class StepMetadata:
    """One step, seen from the scheduler.

    Attributes:
        ends: prompts that end in this step.
        decode: whether every request computes one token (and its draft tokens): a decode step.
        requests: requests in the step.
        kv_tokens: tokens already in the KV cache for them (0 unless decode steps are counted).
        started: `time.monotonic()` at the end of scheduling, seconds.
        restores: (slot, block) of the host store, to copy before the step's hits are added.
        saves: (block, slot) to copy after it.
        store: the host store's totals so far.
        failed: whether the scheduler's hook is off after a fault; everything else is empty then.
    """

    ends: tuple[PromptEnd, ...] = ()
    decode: bool = False
    requests: int = 0
    kv_tokens: int = 0
    started: float = 0.0
    restores: tuple[Move, ...] = ()
    saves: tuple[Move, ...] = ()
    store: StoreTotals = field(default_factory=StoreTotals)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """A prompt's scores [W] against the vectors that `digest` names."""

    digest: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A request's counts as the device had them.

    Attributes:
        counts: uint32 [L, E], sum over the blocks that passed the guard.
        covered: prompt tokens in those blocks.
        tokens: prompt tokens of the request.
        scores: against the worker's vectors; None while it has none.
    """

    counts: Counts = field(repr=False)
    covered: int
    tokens: int
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker returns with the step's sampled tokens: signatures by request."""

    geometry: Geometry
    signatures: Mapping[str, Gathered]
