"""`eldr capture`: an expert trace from a running vLLM, prompt and decoded tokens."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from eldr import cli

if TYPE_CHECKING:
    from eldr.cli.record import Prompt
    from eldr.workload.assemble import RoutedRequest

_EPILOG = """\
The server must return its routing:  vllm serve MODEL --enable-return-routed-experts
vLLM refuses that flag beside a KV connector, so a P/D deployment is captured on a worker that was
started without one; --sample takes a share of its prompts. Prompts file: as for `eldr record`.

examples:
  eldr capture http://w:8000 --prompts prompts.jsonl -o trace.npz --experts 128
  eldr capture http://w:8000 --prompts log.jsonl --sample 0.05 --output-tokens 256 -o trace.npz
"""


class CaptureError(RuntimeError):
    """A server that cannot be captured; the message says what to do."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", help="base URL of a vLLM server")
    add("--prompts", required=True, metavar="FILE", help="JSON lines, as for `eldr record`")
    add("-o", "--output", required=True, metavar="FILE", help=".npz to write")
    add("--experts", type=int, help="routed experts of a layer; default: ask /eldr/info")
    add("--model", default="", help="model name to send (default: the server's)")
    add("--output-tokens", type=int, default=128, help="tokens to decode per prompt")
    add("--temperature", type=float, default=0.8)
    add("--sample", type=float, default=1.0, metavar="F", help="share of the prompts to send")
    add("--seed", type=int, default=0, help="of the sample and of decoding")
    add("--concurrency", type=int, default=8, help="requests in flight")
    add("--timeout", type=float, default=300.0, help="seconds per request")
    add("--api-key", default=os.environ.get("ELDR_API_KEY", ""), help="default: $ELDR_API_KEY")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Captures, writes and reports; requests that fail are reported and left out."""
    from eldr.cli.record import PromptsError, read_prompts
    from eldr.workload.assemble import assemble
    from eldr.workload.traces import TraceError

    if args.output_tokens < 2 or args.concurrency < 1 or not 0 < args.sample <= 1:
        print("eldr capture: needs --output-tokens >= 2, --concurrency >= 1 and --sample in (0, 1]",
              file=sys.stderr)  # fmt: skip
        return cli.USAGE
    try:
        chosen = sample(read_prompts(args.prompts), args.sample, args.seed)
        server = Server(args)
    except PromptsError as error:
        print(f"eldr capture: {error}", file=sys.stderr)
        return cli.USAGE
    except CaptureError as error:
        print(f"eldr capture: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    requests, failed = collect(server, chosen, args.concurrency)
    try:
        trace = assemble(requests, server.experts, server.model)
        trace.save(args.output)
    except (TraceError, OSError) as error:
        print(f"eldr capture: {error}; {failed} of {len(chosen)} failed", file=sys.stderr)
        return cli.NO
    summary = {
        "output": args.output,
        "requests": len(trace),
        "failed": failed,
        "tokens": int(trace.offsets[-1]),
        "geometry": str(trace.geometry),
        "domains": list(trace.domains),
    }
    text = "wrote {output}: {requests} requests, {tokens} tokens ({geometry}), {failed} failed"
    print(json.dumps(summary) if args.json else text.format(**summary))
    return cli.DONE


def sample(prompts: list[Prompt], share: float, seed: int) -> list[Prompt]:
    """`share` of the prompts, at least one, in their order."""
    count = max(1, round(share * len(prompts)))
    picked = set(random.Random(seed).sample(range(len(prompts)), count))
    return [p for i, p in enumerate(prompts) if i in picked]


def collect(
    server: Server, prompts: list[Prompt], concurrency: int
) -> tuple[list[RoutedRequest], int]:
    """The routing of every prompt that did not fail, in order, and how many failed."""
    from eldr.workload.traces import TraceError

    def one(prompt: Prompt) -> RoutedRequest | None:
        try:
            return server.complete(prompt)
        except (CaptureError, TraceError) as error:
            print(f"eldr capture: {prompt.id}: {error}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, prompts))
    kept = [a for a in answers if a is not None]
    return kept, len(answers) - len(kept)


class Server:
    """A vLLM server that returns its routing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._url = args.url.rstrip("/")
        self.model: str = args.model or str(self._get("/v1/models")["data"][0]["id"])
        self.experts: int = args.experts or self._ask_experts()

    def _ask_experts(self) -> int:
        try:
            return int(self._get("/eldr/info")["geometry"]["experts"])
        except (CaptureError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{self._url}/eldr/info does not say how many experts a layer has; give --experts"
            ) from error

    def complete(self, prompt: Prompt) -> RoutedRequest:
        """Decodes one prompt.

        Raises:
            CaptureError: the server failed, or returned no routing.
            TraceError: it returned something else than routing.
        """
        import numpy as np

        from eldr.workload.assemble import RoutedRequest, decode_routed_experts

        args = self._args
        body = {
            "model": self.model,
            "prompt": prompt.prompt,
            "max_tokens": args.output_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._post("/v1/completions", body)
        choice = answer["choices"][0]
        if choice.get("routed_experts") is None:
            raise CaptureError("no routing returned; serve with --enable-return-routed-experts")
        topk = decode_routed_experts(choice["routed_experts"])
        ids = (choice.get("prompt_token_ids") or []) + (choice.get("token_ids") or [])
        # The last sampled token was never run through the model, so it has no row.
        tokens = np.array(ids[: len(topk)], np.uint32) if len(ids) >= len(topk) else None
        prompt_tokens = int(answer["usage"]["prompt_tokens"])
        return RoutedRequest(topk, prompt_tokens, prompt.domain, tokens)

    def _get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self._url + path, headers=self._headers()))

    def _post(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        headers = {**self._headers(), "Content-Type": "application/json"}
        return self._send(urllib.request.Request(self._url + path, data, headers))

    def _headers(self) -> dict[str, str]:
        key = self._args.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self._args.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()[:300].decode("utf-8", "replace")
            raise CaptureError(f"{request.full_url}: HTTP {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise CaptureError(f"{request.full_url}: {error}") from error
