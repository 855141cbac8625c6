"""The bundled demo model (a trained tiny Qwen3-MoE), held-out prompts, and a trace of its routing.

Loads neither torch nor NumPy: the command line reads prompts and geometry from here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eldr.geometry import Geometry

_HERE = Path(__file__).resolve().parent
MODEL_DIR = _HERE / "tiny_moe"
PROMPT_DIR = _HERE / "prompts"
# 420 requests of this model in seven domains, in the format of `eldr.workload.traces`.
TRACE_PATH = _HERE / "tiny_trace" / "trace.npz"

GEOMETRY = Geometry(layers=4, experts=64, top_k=4)
DOMAINS = ("legal", "code_py", "math", "med")
SPLITS = ("calibration", "serving", "reference")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One held-out request of the demo's task mix.

    Attributes:
        id: unique over all splits.
        domain: one of `DOMAINS`.
        prompt: the text; 192 tokens of the bundled tokenizer, give or take two.
        source: the work it is an excerpt of; `prompts/NOTICE` has the licences.
    """

    id: str
    domain: str
    prompt: str
    source: str


def load_prompts(split: str, domains: Iterable[str] | None = None) -> list[Prompt]:
    """The prompts of one split, in the fixed order of its file; splits are disjoint.

    Args:
        split: `calibration` (to fit a partition), `serving` (to replay) or `reference` (to compare
            outputs).
        domains: keep only these; None keeps all of `DOMAINS`.

    Raises:
        ValueError: on an unknown split or domain.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown prompt split {split!r}; choose from {', '.join(SPLITS)}")
    wanted = set(DOMAINS if domains is None else domains)
    if unknown := sorted(wanted - set(DOMAINS)):
        raise ValueError(f"unknown domain(s) {', '.join(unknown)}; choose from {DOMAINS}")
    return [p for p in _read(PROMPT_DIR / f"{split}.jsonl") if p.domain in wanted]


def _read(path: Path) -> Iterator[Prompt]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Prompt(**json.loads(line))
