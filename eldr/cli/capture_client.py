"""A vLLM server that returns its routing, as `eldr capture` asks it."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eldr.workload.assemble import RoutedRequest


class CaptureError(RuntimeError):
    """A server or an answer that cannot be captured; the message says what to do."""


class Server:
    """Asks for the model's name and experts once, then replays requests.

    Args:
        args: `url`, `model`, `experts`, `timeout` and `api_key` of the command line.

    Raises:
        CaptureError: the server cannot be reached, or does not say how many experts there are.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._url = args.url.rstrip("/")
        self._key, self._timeout = args.api_key, args.timeout
        self.model: str = args.model or str(self._get("/v1/models")["data"][0]["id"])
        self.experts: int = args.experts or self._ask_experts()

    def _ask_experts(self) -> int:
        try:
            return int(self._get("/eldr/info")["geometry"]["experts"])
        except (CaptureError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{self._url}/eldr/info does not say how many experts a layer has; give --experts"
            ) from error

    def replay(self, path: str, body: dict[str, Any], domain: str) -> RoutedRequest:
        """Runs one request to its end and returns the routing of its prompt and its answer.

        Args:
            path: /v1/completions or /v1/chat/completions.
            body: what a client would send there; model and streaming are overridden.
            domain: label.

        Raises:
            CaptureError: the server failed.
            TraceError: it returned no routing, something else, or decoded nothing.
        """
        from eldr.workload.assemble import routing_of

        own = {"model": self.model, "stream": False, "n": 1, "return_token_ids": True}
        return routing_of(self._post(path, {**body, **own}), domain)

    def _get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self._url + path, headers=self._headers()))

    def _post(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        headers = {**self._headers(), "Content-Type": "application/json"}
        return self._send(urllib.request.Request(self._url + path, data, headers))

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()[:300].decode("utf-8", "replace")
            raise CaptureError(f"{request.full_url}: HTTP {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise CaptureError(f"{request.full_url}: {error}") from error
