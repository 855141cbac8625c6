"""Cuts each domain's documents into blocks and holds every tenth one out.

    python -m eldr.workload.training.corpus SOURCES_DIR CORPUS_DIR

writes `<domain>.train.json` and `<domain>.test.json` (lists of blocks of text) and `manifest.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eldr.workload.training.readers import Document, documents
from eldr.workload.training.sources import SOURCES


@dataclass(frozen=True, slots=True)
class Cut:
    """How a domain's text is cut.

    Attributes:
        keep: bytes of UTF-8 kept per domain.
        block: bytes of one contiguous block.
        held_out: one block in so many is for testing.
    """

    keep: int = 2_600_000
    block: int = 16_384
    held_out: int = 10

    def __post_init__(self) -> None:
        if min(self.keep, self.block) < 1 or self.held_out < 2:
            raise ValueError(f"cut: sizes must be positive and held_out at least 2, got {self}")


def split(texts: Iterable[Document], cut: Cut) -> tuple[list[str], list[str]]:
    """Training and held-out blocks of the documents in a row; characters cut in two are dropped."""
    joined = ""
    for document in texts:
        joined += document.text.strip() + "\n\n"
        if len(joined) > 2 * cut.keep:
            break
    raw = joined.encode()[: cut.keep]
    starts = range(0, len(raw), cut.block)
    blocks = [raw[i : i + cut.block].decode("utf-8", "ignore") for i in starts]
    last = cut.held_out - 1
    train = [b for i, b in enumerate(blocks) if i % cut.held_out != last]
    return train, blocks[last :: cut.held_out]


def build(
    sources: Path, out: Path, domains: Sequence[str], cut: Cut
) -> dict[str, dict[str, object]]:
    """Writes the corpus of `domains` and returns its manifest.

    Raises:
        FileNotFoundError: a package is not in `sources`.
        ValueError: unknown domain.
    """
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, dict[str, object]] = {}
    for domain in domains:
        train, test = split(documents(domain, sources), cut)
        if not test:
            raise ValueError(
                f"{domain}: {len(train)} block(s) of text, {cut.held_out} are needed to hold one "
                f"out; was {sources} unpacked fully?"
            )
        sizes = {}
        for part, blocks in (("train", train), ("test", test)):
            path = out / f"{domain}.{part}.json"
            path.write_text(json.dumps(blocks, ensure_ascii=False), encoding="utf-8")
            sizes[f"{part}_bytes"] = sum(len(b.encode()) for b in blocks)
        source = SOURCES[domain]
        packages = [f"{p.registry}: {p.name} {p.version}" for p in source.packages]
        manifest[domain] = {
            "source": source.text,
            "packages": packages,
            "licence": source.licence,
            **sizes,
        }
        print(f"{domain}: {sizes['train_bytes']} + {sizes['test_bytes']} bytes", file=sys.stderr)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def read_blocks(corpus: Path, domain: str, part: str) -> list[str]:
    """The blocks that `build` wrote; `part` is `train` or `test`."""
    blocks = json.loads((corpus / f"{domain}.{part}.json").read_text(encoding="utf-8"))
    return [str(b) for b in blocks]


def read_domains(corpus: Path) -> list[str]:
    """The corpus' domains, in order."""
    return list(json.loads((corpus / "manifest.json").read_text(encoding="utf-8")))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.corpus",
        description="Build the labelled corpus from unpacked packages.",
    )
    parser.add_argument("sources", type=Path, help="folder that training.download filled")
    parser.add_argument("corpus", type=Path, help="folder to write")
    parser.add_argument("--domain", action="append", choices=list(SOURCES), help="default: all")
    parser.add_argument("--keep", type=int, default=Cut().keep, help="bytes kept per domain")
    parser.add_argument("--block", type=int, default=Cut().block, help="bytes of one block")
    args = parser.parse_args(argv)
    try:
        cut = Cut(keep=args.keep, block=args.block)
        manifest = build(args.sources, args.corpus, args.domain or list(SOURCES), cut)
    except (OSError, ValueError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 2
    print(json.dumps(manifest))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
