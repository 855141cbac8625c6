"""`eldr record`: signatures into a file, of prompts or of the traffic that a router has served."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eldr import cli

if TYPE_CHECKING:
    from eldr.cli.prefill_client import PrefillWorker
    from eldr.geometry import Geometry
    from eldr.routing.recorded import Recorded
    from eldr.signature import Signature

FORMS = ("exact", "8bit", "sampled")  # eldr.signature.FORMS, which this module must not load yet

_EPILOG = """\
prompts file: one JSON object a line, `prompt` (text or token ids) or `prompt_token_ids`,
and optionally `domain` (becomes the label) and `id` (for messages):
  {"prompt": "Translate to German: ...", "domain": "translation", "id": "t-17"}

examples:
  eldr record --prefill http://p:8100 --prompts prompts.jsonl -o signatures.npz

exit codes: 0 written, 1 all prompts failed, 2 usage, 3 the worker or the output cannot be used
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
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prefill", metavar="URL", help="a patched prefill worker")
    source.add_argument(
        "--router", metavar="URL", help="a running router, whose prefill workers are asked in turn"
    )
    source.add_argument(
        "--log",
        action="append",
        metavar="FILE",
        help="decision log of a router with --decision-log-signatures (repeat, oldest first)",
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines, see below; not with --log")
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
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="exact",
        help="keep what a router would read if the engine sent this form (to see what it loses)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Records, writes and reports; prompts that fail are reported and left out."""
    from eldr.cli.logged import LogError
    from eldr.cli.prefill_client import WorkerError
    from eldr.cli.router_client import RouterError

    if args.concurrency < 1 or args.timeout <= 0 or args.limit < 0:
        print("eldr record: --concurrency and --timeout must be positive", file=sys.stderr)
        return cli.USAGE
    if bool(args.log) == bool(args.prompts):
        print("eldr record: --prompts goes with --prefill or --router, not --log", file=sys.stderr)
        return cli.USAGE
    try:
        recorded, failed = _from_log(args) if args.log else _from_prompts(args)
    except PromptsError as error:
        print(f"eldr record: {error}", file=sys.stderr)
        return cli.USAGE
    except (WorkerError, RouterError, LogError) as error:
        print(f"eldr record: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    if recorded is None:
        print(f"eldr record: all {failed} prompts failed; nothing written", file=sys.stderr)
        return cli.NO
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


def _from_log(args: argparse.Namespace) -> tuple[Recorded | None, int]:
    from eldr.cli.logged import from_logs

    return from_logs(args.log, model=args.model, form=args.form, limit=args.limit)


def _from_prompts(args: argparse.Namespace) -> tuple[Recorded | None, int]:
    """What the prompts gave, None if nothing, and how many failed."""
    from eldr.cli.prefill_client import connect

    prompts = read_prompts(args.prompts)
    if args.limit:
        prompts = prompts[: args.limit]
    urls = prefill_workers(args.router) if args.router else [args.prefill]
    workers = [
        connect(url, model=args.model, api_key=args.api_key, timeout=args.timeout) for url in urls
    ]
    pairs, failed = collect(workers, prompts, args.concurrency)
    if not pairs:
        return None, failed
    domains = [prompt.domain for prompt, _ in pairs]
    signatures = [signature for _, signature in pairs]
    first = workers[0]
    return gather(first.geometry, first.model, signatures, domains, args.form), failed


def prefill_workers(router: str) -> list[str]:
    """URLs of a running router's prefill workers.

    Raises:
        RouterError: no answer, or none of them.
    """
    from eldr.cli.router_client import RouterError, get_json

    answer = get_json(router, "/workers")
    rows = answer.get("prefill") if isinstance(answer, dict) else None
    names = [str(row["name"]) for row in rows or [] if isinstance(row, dict) and "name" in row]
    if not names:
        raise RouterError(f"{router}/workers: names no prefill worker")
    return list(dict.fromkeys(names))


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
    workers: Sequence[PrefillWorker], prompts: Sequence[Prompt], concurrency: int
) -> tuple[list[tuple[Prompt, Signature]], int]:
    """Signatures in the order of the prompts, and how many prompts failed (logged)."""
    from eldr.cli.prefill_client import WorkerError

    def ask(index: int) -> Signature | None:
        prompt, worker = prompts[index], workers[index % len(workers)]
        try:
            signature = worker.signature(prompt.prompt)
        except WorkerError as error:
            print(f"eldr record: {prompt.id}: {error}", file=sys.stderr)
            return None
        if signature.coverage <= 0.0:
            print(f"eldr record: {prompt.id}: coverage 0, left out", file=sys.stderr)
            return None
        return signature

    with ThreadPoolExecutor(concurrency) as pool:
        answers: Iterator[Signature | None] = pool.map(ask, range(len(prompts)))
        pairs = [(p, s) for p, s in zip(prompts, answers, strict=True) if s is not None]
    return pairs, len(prompts) - len(pairs)


def gather(
    geometry: Geometry,
    model: str,
    signatures: Sequence[Signature],
    domains: Sequence[str] = (),
    form: str = "exact",
) -> Recorded:
    """The file's content; labels only if some signature has a domain.

    A sampled signature is recorded as the prompt of as many tokens that it stands for.
    """
    import numpy as np

    from eldr.routing.recorded import Recorded
    from eldr.signature import decode, encode

    if form != "exact":
        signatures = [
            s if s.sampled is not None else decode(encode(s, geometry, form), geometry)
            for s in signatures
        ]
    counts = np.stack([s.counts for s in signatures])
    return Recorded(
        counts.astype(np.uint16) if counts.max() <= np.iinfo(np.uint16).max else counts,
        np.array([s.tokens if s.sampled is None else s.sampled for s in signatures], np.int32),
        np.array([s.coverage if s.sampled is None else 1.0 for s in signatures], np.float32),
        geometry,
        model,
        np.array(domains) if any(domains) else None,
    )
