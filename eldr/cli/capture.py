"""`eldr capture`: an expert trace from a running vLLM, prompt and decoded tokens."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from eldr import cli
from eldr.cli.capture_client import CaptureError, Server

if TYPE_CHECKING:
    from eldr.cli.record import Prompt
    from eldr.workload.assemble import RoutedRequest

_EPILOG = """\
The server at URL must return its routing:  vllm serve MODEL --enable-return-routed-experts
vLLM refuses that flag beside a KV connector, so a P/D deployment needs one worker more, started
without one. Requests come from a prompts file (as for `eldr record`), or from the deployment: with
--listen, `eldr capture` is what a gateway mirrors its requests to (nginx `mirror`, Envoy
`request_mirror_policies`); it answers copies at once, replays a sample of them on URL, and ends
after --requests of them, --seconds, or Ctrl-C. What it has then is written. Answers of vLLM that
were saved with their `routed_experts` are made a trace without any server (--answers).

examples:
  eldr capture http://w:8000 --prompts prompts.jsonl -o trace.npz --experts 128
  eldr capture http://w:8000 --listen 0.0.0.0:8090 --sample 0.05 --requests 2000 -o trace.npz
  eldr capture --answers answers.jsonl --experts 128 -o trace.npz

exit codes: 0 written, 1 nothing was captured, 2 usage, 3 the worker or the output cannot be used
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", help="base URL of a vLLM server that returns its routing")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", metavar="FILE", help="JSON lines, as for `eldr record`")
    source.add_argument("--listen", metavar="[HOST:]PORT",
                        help="take copies of a deployment's requests there")  # fmt: skip
    source.add_argument("--answers", metavar="FILE",
                        help="JSON lines: answers of vLLM, `domain` labels one")  # fmt: skip
    add("-o", "--output", required=True, metavar="FILE", help=".npz to write")
    add("--experts", type=int, help="routed experts of a layer; default: ask /eldr/info")
    add("--model", default="", help="model name to send (default: the server's)")
    add("--output-tokens", type=int, default=128,
        help="tokens to decode per prompt; of a copied request, at most")  # fmt: skip
    add("--temperature", type=float, default=0.8, help="with --prompts")
    add("--sample", type=float, default=1.0, metavar="F", help="share of the requests to take")
    add("--requests", type=int, default=1000, metavar="N", help="with --listen: enough")
    add("--seconds", type=float, default=0.0, metavar="S", help="with --listen: end after S")
    add("--label-header", default="X-ELDR-Domain", metavar="NAME",
        help="with --listen: header whose value labels a request")  # fmt: skip
    add("--seed", type=int, default=0, help="of the sample and of decoding")
    add("--concurrency", type=int, default=8, help="requests in flight")
    add("--timeout", type=float, default=300.0, help="seconds per request")
    add("--api-key", default=os.environ.get("ELDR_API_KEY", ""), help="default: $ELDR_API_KEY")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Captures, writes and reports; requests that fail are reported and left out."""
    from eldr.workload.assemble import assemble
    from eldr.workload.traces import TraceError

    try:
        _check(args)
        requests, experts, model, counts = _captured(args)
    except ValueError as error:
        print(f"eldr capture: {error}", file=sys.stderr)
        return cli.USAGE
    except (CaptureError, OSError) as error:
        print(f"eldr capture: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    try:
        trace = assemble(requests, experts, model)
        trace.save(args.output)
    except (TraceError, OSError) as error:
        print(f"eldr capture: {error}; {counts['failed']} failed", file=sys.stderr)
        return cli.NO
    summary = {
        "output": args.output,
        "requests": len(trace),
        **counts,
        "tokens": int(trace.offsets[-1]),
        "geometry": str(trace.geometry),
        "domains": list(trace.domains),
    }
    text = "wrote {output}: {requests} requests, {tokens} tokens ({geometry}), {failed} failed"
    print(json.dumps(summary) if args.json else text.format(**summary))
    return cli.DONE


def _check(args: argparse.Namespace) -> None:
    if args.output_tokens < 2 or args.concurrency < 1 or not 0 < args.sample <= 1:
        raise ValueError("needs --output-tokens >= 2, --concurrency >= 1 and --sample in (0, 1]")
    if args.requests < 1 or not args.seconds >= 0:
        raise ValueError("needs --requests >= 1 and --seconds >= 0")
    if (args.url is None) != (args.answers is not None):
        raise ValueError("needs a URL, or --answers instead of one")
    if args.answers is not None and not args.experts:
        raise ValueError("--answers does not say how many experts a layer has; give --experts")


_Captured = tuple[list["RoutedRequest"], int, str, dict[str, int]]


def _captured(args: argparse.Namespace) -> _Captured:
    """Requests, experts, model, and counts for the summary, `failed` always among them."""
    from eldr.cli.record import read_prompts
    from eldr.workload.assemble import read_answers

    if args.answers is not None:
        return read_answers(args.answers), args.experts, args.model, {"failed": 0}
    if args.listen is not None:
        return _mirrored(args)
    chosen = sample(read_prompts(args.prompts), args.sample, args.seed)
    server = Server(args)
    requests, failed = collect(server, chosen, args)
    return requests, server.experts, server.model, {"failed": failed}


def _mirrored(args: argparse.Namespace) -> _Captured:
    from eldr.cli.capture_mirror import Mirror, MirrorConfig

    host, _, port = args.listen.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"--listen {args.listen}: expected PORT or HOST:PORT")
    config = MirrorConfig(
        host or "127.0.0.1", int(port), args.requests, args.seconds, args.sample,
        args.output_tokens, args.concurrency, args.seed, args.label_header,
    )  # fmt: skip
    server = Server(args)
    mirror = Mirror(server, config)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: mirror.close())
    print(f"eldr capture: mirror requests to {host or '127.0.0.1'}:{mirror.port}", file=sys.stderr)
    requests = mirror.run()
    names = ("seen", "sampled", "dropped", "failed")
    counts = {name: mirror.counts[name] for name in names}
    return requests, server.experts, server.model, counts


def sample(prompts: list[Prompt], share: float, seed: int) -> list[Prompt]:
    """`share` of the prompts, at least one, in their order."""
    count = max(1, round(share * len(prompts)))
    picked = set(random.Random(seed).sample(range(len(prompts)), count))
    return [p for i, p in enumerate(prompts) if i in picked]


def collect(
    server: Server, prompts: list[Prompt], args: argparse.Namespace
) -> tuple[list[RoutedRequest], int]:
    """The routing of every prompt that did not fail, in order, and how many failed."""
    from eldr.workload.traces import TraceError

    def one(prompt: Prompt) -> RoutedRequest | None:
        body = {
            "prompt": prompt.prompt,
            "max_tokens": args.output_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "ignore_eos": True,
        }
        try:
            return server.replay("/v1/completions", body, prompt.domain)
        except (CaptureError, TraceError) as error:
            print(f"eldr capture: {prompt.id}: {error}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(args.concurrency) as pool:
        answers = list(pool.map(one, prompts))
    kept = [a for a in answers if a is not None]
    return kept, len(answers) - len(kept)
