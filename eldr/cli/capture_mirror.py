"""A sample of a running deployment's traffic: the receiving end of a proxy's request mirroring.

nginx (`mirror`), Envoy (`request_mirror_policies`) and most gateways can send a copy of every
request elsewhere and ignore the answer. This server takes the copies, answers at once, and has a
share of them replayed on a vLLM that returns its routing. The deployment itself is not touched; a
copy that comes while all replays are busy is dropped and counted, never queued up without end.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from eldr.cli.capture_client import CaptureError, Server

if TYPE_CHECKING:
    from eldr.workload.assemble import RoutedRequest

PATHS = ("/v1/completions", "/v1/chat/completions")
_MOST_BYTES = 16 << 20  # of one request
_LENGTHS = ("max_tokens", "max_completion_tokens")
_GRACE = 5.0  # seconds for replays in flight when the run ends; what comes later is left out


@dataclass(frozen=True, slots=True)
class MirrorConfig:
    """What is taken, and when it is enough.

    Attributes:
        host, port: where copies arrive; port 0 picks a free one.
        requests: captured requests that end the run.
        seconds: end after this time at the latest, 0 = no limit.
        share: part of the copies to replay, (0, 1].
        output_tokens: answers are cut here.
        concurrency: replays at a time.
        seed: of the sample.
        label_header: header whose value labels a request.
    """

    host: str
    port: int
    requests: int
    seconds: float
    share: float
    output_tokens: int
    concurrency: int
    seed: int
    label_header: str


class Mirror:
    """Receives copies until enough are captured; `close` may be called from a signal handler."""

    def __init__(self, server: Server, config: MirrorConfig) -> None:
        self._server, self._config = server, config
        self._work: queue.Queue[tuple[str, dict[str, Any], str]] = queue.Queue(config.concurrency)
        self._random, self._lock = random.Random(config.seed), threading.Lock()
        self._enough = threading.Event()
        self._captured: list[RoutedRequest] = []
        self.counts: Counter[str] = Counter()
        self._http = ThreadingHTTPServer((config.host, config.port), _handler(self._take, config))

    @property
    def port(self) -> int:
        """Where copies arrive."""
        return self._http.server_port

    def close(self) -> None:
        """Ends `run`."""
        self._enough.set()

    def run(self) -> list[RoutedRequest]:
        """Captures until there is enough, time is up or `close` is called; what was captured."""
        serving = threading.Thread(target=self._http.serve_forever, daemon=True)
        replays = [
            threading.Thread(target=self._replay, daemon=True)
            for _ in range(self._config.concurrency)
        ]
        for thread in (serving, *replays):
            thread.start()
        try:
            self._enough.wait(self._config.seconds or None)
        finally:
            self._enough.set()
            self._http.shutdown()
            self._http.server_close()
            serving.join()
        deadline = time.monotonic() + _GRACE
        for thread in replays:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return list(self._captured)

    def _take(self, path: str, body: dict[str, Any], label: str) -> None:
        with self._lock:
            self.counts["seen"] += 1
            if self._random.random() >= self._config.share:
                return
            try:
                self._work.put_nowait((path, shortened(body, self._config.output_tokens), label))
                self.counts["sampled"] += 1
            except queue.Full:
                self.counts["dropped"] += 1

    def _replay(self) -> None:
        from eldr.workload.traces import TraceError

        while not self._enough.is_set():
            try:
                path, body, label = self._work.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                found = self._server.replay(path, body, label)
            except (CaptureError, TraceError) as error:
                print(f"eldr capture: {error}", file=sys.stderr)
                with self._lock:
                    self.counts["failed"] += 1
                continue
            with self._lock:
                if len(self._captured) < self._config.requests:
                    self._captured.append(found)
                if len(self._captured) >= self._config.requests:
                    self._enough.set()


def shortened(body: dict[str, Any], most: int) -> dict[str, Any]:
    """The request as it is replayed: its answer is cut at `most` tokens, its transport is gone."""
    kept = {k: v for k, v in body.items() if k not in ("stream_options", "kv_transfer_params")}
    lengths = [k for k in _LENGTHS if isinstance(kept.get(k), int)]
    for key in lengths:
        kept[key] = min(kept[key], most)
    return kept if lengths else {**kept, "max_tokens": most}


def _handler(
    take: Callable[[str, dict[str, Any], str], None], config: MirrorConfig
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers before anything is replayed: nobody waits for a copy."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Takes a copy."""
            size = self.headers.get("Content-Length", "")
            if not size.isdigit() or int(size) > _MOST_BYTES:
                self.close_connection = True
                return self._answer(411, "a copy needs a Content-Length below 16 MiB")
            data = self.rfile.read(int(size))
            path = self.path.partition("?")[0]
            if path not in PATHS:
                return self._answer(404, f"captured are {' and '.join(PATHS)}")
            try:
                body = json.loads(data)
            except ValueError:
                body = None
            if not isinstance(body, dict):
                return self._answer(400, "not a JSON object")
            take(path, body, self.headers.get(config.label_header, ""))
            return self._answer(202, "")

        def do_GET(self) -> None:
            """Says that it lives."""
            self._answer(200 if self.path == "/health" else 404, "")

        def _answer(self, code: int, text: str) -> None:
            data = json.dumps({"error": text} if text else {}).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler
