"""Makes the demo's prompt files from a captured trace: text of its prompts, in disjoint splits.

    python -m eldr.workload.training.prompts TRACE.npz TOKENIZER_DIR SOURCES_DIR PROMPTS_DIR

Only domains whose texts may be shipped are taken. A prompt is dropped when it holds a broken
character or does not encode to its own length again, give or take two tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eldr.workload import traces
from eldr.workload.tiny import DOMAINS, Prompt
from eldr.workload.training.readers import documents
from eldr.workload.training.sources import SOURCES

# Prompts per domain in each split.
SIZES = {"calibration": 36, "serving": 60, "reference": 8}
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SLACK = 2


class Attribution:
    """Finds the document that an excerpt of a domain comes from."""

    def __init__(self, domain: str, sources: Path) -> None:
        self._documents = [(d.name, _squeeze(d.text)) for d in documents(domain, sources)]

    def __call__(self, excerpt: str) -> str:
        """Name of the first document that holds the excerpt, or a part of it where blocks meet.

        Raises:
            ValueError: no document does.
        """
        whole = _squeeze(excerpt)
        for parts in (1, 2, 4):
            size = len(whole) // parts
            for start in range(0, size * parts, size):
                for name, text in self._documents:
                    if whole[start : start + size] in text:
                        return name
        raise ValueError(f"no document of the sources holds the excerpt {excerpt[:60]!r}")


def usable_prompts(
    trace: traces.ExpertTrace, domain: str, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[int, str]]:
    """(request, text) of the domain's prompts that survive decoding, without repeats.

    Raises:
        ValueError: the trace has no token ids, or no such domain.
    """
    if trace.tokens is None or domain not in trace.domains:
        raise ValueError(f"the trace has no token ids or no domain {domain!r}: {trace.domains}")
    found: dict[str, int] = {}
    for request in np.flatnonzero(trace.domain == trace.domains.index(domain)):
        ids = trace.tokens[trace.offsets[request] : trace.cuts[request]].tolist()
        text = tokenizer.decode(ids)
        again = len(tokenizer(text)["input_ids"])
        if _BROKEN not in text and abs(again - len(ids)) <= _SLACK:
            found.setdefault(text, int(request))
    return [(request, text) for text, request in found.items()]


def make_splits(
    trace: traces.ExpertTrace, tokenizer: PreTrainedTokenizerFast, sources: Path, seed: int
) -> dict[str, list[Prompt]]:
    """Disjoint splits with `SIZES` prompts of each domain, shuffled.

    Raises:
        ValueError: too few usable prompts, or a domain whose text may not be shipped.
    """
    rng = random.Random(seed)
    splits: dict[str, list[Prompt]] = {name: [] for name in SIZES}
    for domain in DOMAINS:
        if not SOURCES[domain].permissive:
            raise ValueError(f"{domain}: its text ({SOURCES[domain].licence}) may not be shipped")
        usable = usable_prompts(trace, domain, tokenizer)
        if len(usable) < sum(SIZES.values()):
            raise ValueError(f"{domain}: {len(usable)} usable prompts, need {sum(SIZES.values())}")
        rng.shuffle(usable)
        source_of = Attribution(domain, sources)
        rest = iter(usable)
        for name, size in SIZES.items():
            for request, text in islice(rest, size):
                splits[name].append(Prompt(f"{domain}-{request}", domain, text, source_of(text)))
    for prompts in splits.values():
        rng.shuffle(prompts)
    return splits


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.prompts",
        description="Write the demo's prompt files from a captured trace.",
    )
    parser.add_argument("trace", type=Path, help="trace with token ids, from training.capture")
    parser.add_argument("tokenizer", type=Path, help="folder with the tokenizer")
    parser.add_argument("sources", type=Path, help="folder that training.download filled")
    parser.add_argument("prompts", type=Path, help="folder to write to")
    parser.add_argument("--seed", type=int, default=20607)
    args = parser.parse_args(argv)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        splits = make_splits(traces.load(args.trace), tokenizer, args.sources, args.seed)
    except (OSError, ValueError) as error:
        print(f"prompts: {error}", file=sys.stderr)
        return 2
    args.prompts.mkdir(parents=True, exist_ok=True)
    for name, prompts in splits.items():
        lines = [json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in prompts]
        (args.prompts / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
