"""`eldr record`: signatures of many prompts, from a running prefill worker into a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eldr import cli

if TYPE_CHECKING:
    from eldr.cli.prefill_client import PrefillWorker
    from eldr.routing.recorded import Recorded
    from eldr.signature import Signature

_EPILOG = """\
prompts file: one JSON object a line, `prompt` (text or token ids) or `prompt_token_ids`,
and optionally `domain` (becomes the label) and `id` (for messages):
  {"prompt": "Translate to German: ...", "domain": "translation", "id": "t-17"}

examples:
  eldr record --prefill http://p:8100 --prompts prompts.jsonl -o signatures.npz
"""


class PromptsError(ValueError):
    """A prompts file that cannot be used; the message has the line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompts file."""

    id: str
    prompt: str | list[int]
    domain: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("--prefill", required=True, metavar="URL", help="a patched prefill worker")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSON lines, see below")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".npz to write")
    parser.add_argument("--model", default="", help="model name to send (default: as reported)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per request")
    parser.add_argument("--limit", type=int, default=0, help="use only the first N prompts")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("ELDR_API_KEY", ""),
        help="bearer token of the worker (default: $ELDR_API_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Records, writes and reports; prompts that fail are reported and left out."""
    from eldr.cli.prefill_client import WorkerError, connect

    if args.concurrency < 1 or args.timeout <= 0 or args.limit < 0:
        print("eldr record: --concurrency and --timeout must be positive", file=sys.stderr)
        return cli.USAGE
    try:
        prompts = read_prompts(args.prompts)
        if args.limit:
            prompts = prompts[: args.limit]
        worker = connect(args.prefill, model=args.model, api_key=args.api_key, timeout=args.timeout)
    except PromptsError as error:
        print(f"eldr record: {error}", file=sys.stderr)
        return cli.USAGE
    except WorkerError as error:
        print(f"eldr record: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    pairs, failed = collect(worker, prompts, args.concurrency)
    if not pairs:
        print(f"eldr record: all {failed} prompts failed; nothing written", file=sys.stderr)
        return cli.NO
    recorded = gather(worker, pairs)
    try:
        recorded.save(args.output)
    except OSError as error:
        print(f"eldr record: cannot write {args.output}: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    summary = {
        "output": args.output,
        "signatures": len(recorded),
        "failed": failed,
        "tokens": int(recorded.tokens.sum()),
        "model": recorded.model,
        "geometry": str(recorded.geometry),
    }
    text = "wrote {output}: {signatures} signatures of {model} ({geometry}), {failed} failed"
    print(json.dumps(summary) if args.json else text.format(**summary))
    return cli.DONE


def read_prompts(path: str) -> list[Prompt]:
    """Reads and validates the prompts file.

    Raises:
        PromptsError: unreadable, empty, or a malformed line, named by its number.
    """
    try:
        with open(path, encoding="utf-8") as file:
            prompts = [_prompt(line, number) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: cannot read prompts: {error}") from error
    except PromptsError as error:
        raise PromptsError(f"{path}: {error}") from error
    if not prompts:
        raise PromptsError(f"{path}: no prompts")
    return prompts


def _prompt(line: str, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"line {number}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise PromptsError(f"line {number}: expected an object, got {type(entry).__name__}")
    prompt = entry.get("prompt_token_ids", entry.get("prompt"))
    ids = isinstance(prompt, list) and all(
        isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in prompt
    )
    if not prompt or not (isinstance(prompt, str) or ids):
        raise PromptsError(f"line {number}: needs `prompt` (text or ids) or `prompt_token_ids`")
    return Prompt(str(entry.get("id", f"line {number}")), prompt, str(entry.get("domain", "")))


def collect(
    worker: PrefillWorker, prompts: Iterable[Prompt], concurrency: int
) -> tuple[list[tuple[Prompt, Signature]], int]:
    """Signatures in the order of the prompts, and how many prompts failed (logged)."""
    from eldr.cli.prefill_client import WorkerError

    def ask(prompt: Prompt) -> Signature | None:
        try:
            signature = worker.signature(prompt.prompt)
        except WorkerError as error:
            print(f"eldr record: {prompt.id}: {error}", file=sys.stderr)
            return None
        if signature.coverage <= 0.0:
            print(f"eldr record: {prompt.id}: coverage 0, left out", file=sys.stderr)
            return None
        return signature

    entries = list(prompts)
    with ThreadPoolExecutor(concurrency) as pool:
        answers: Iterator[Signature | None] = pool.map(ask, entries)
        pairs = [(p, s) for p, s in zip(entries, answers, strict=True) if s is not None]
    return pairs, len(entries) - len(pairs)


def gather(worker: PrefillWorker, pairs: list[tuple[Prompt, Signature]]) -> Recorded:
    """The file's content; labels only if some prompt has a domain."""
    import numpy as np

    from eldr.routing.recorded import Recorded

    counts = np.stack([signature.counts for _, signature in pairs])
    domains = [prompt.domain for prompt, _ in pairs]
    return Recorded(
        counts.astype(np.uint16) if counts.max() <= np.iinfo(np.uint16).max else counts,
        np.array([signature.tokens for _, signature in pairs], np.int32),
        np.array([signature.coverage for _, signature in pairs], np.float32),
        worker.geometry,
        worker.model,
        np.array(domains) if any(domains) else None,
    )
