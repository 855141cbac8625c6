"""Asks a patched prefill worker for signatures over HTTP (standard library only)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from eldr.geometry import Geometry
from eldr.signature import Signature, SignatureError, decode


class WorkerError(RuntimeError):
    """A worker that cannot be used, or one request that it refused; the message says why."""


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """A checked prefill worker.

    Attributes:
        url: base URL.
        model: name to send in requests.
        geometry: what its signatures must have.
        api_key: bearer token, "" = none.
        timeout: seconds per request.
    """

    url: str
    model: str
    geometry: Geometry
    api_key: str = ""
    timeout: float = 120.0

    def signature(self, prompt: str | list[int]) -> Signature:
        """The signature of one prompt.

        Raises:
            WorkerError: refused, unreachable, or an answer without a usable signature.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "kv_transfer_params": {"eldr": {"counts": True}},
        }
        answer = _call(f"{self.url}/v1/completions", self.api_key, self.timeout, body)
        payload = (answer.get("kv_transfer_params") or {}).get("eldr")
        if payload is None:
            raise WorkerError(f"{self.url}: the answer has no kv_transfer_params.eldr")
        try:
            return decode(payload, self.geometry)
        except SignatureError as error:
            raise WorkerError(f"{self.url}: {error}") from error


def connect(
    url: str, *, model: str = "", api_key: str = "", timeout: float = 120.0
) -> PrefillWorker:
    """Checks `GET /eldr/info` and returns the worker.

    Raises:
        WorkerError: it does not answer, is not patched or configured, or is not a prefill worker.
    """
    url = url.rstrip("/")
    info = _call(f"{url}/eldr/info", api_key, min(timeout, 30.0))
    try:
        version, role, shape = info["v"], info["role"], info["geometry"]
        geometry = Geometry(shape["layers"], shape["experts"], shape["top_k"])
        served = model or str(info["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise WorkerError(f"{url}/eldr/info: malformed answer: {error!r}") from error
    if version != 1:
        raise WorkerError(f"{url}: speaks version {version} of /eldr/info, this eldr speaks 1")
    if role != "prefill":
        raise WorkerError(f"{url}: is a {role} worker; signatures come from a prefill worker")
    if geometry.digest != shape.get("digest"):
        raise WorkerError(f"{url}: geometry digest {shape.get('digest')!r} is not of {geometry}")
    return PrefillWorker(url, served, geometry, api_key, timeout)


def _call(url: str, api_key: str, timeout: float, body: object = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise WorkerError(_refusal(url, error)) from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise WorkerError(f"{url}: no answer ({reason}); is the worker running there?") from error
    except ValueError as error:
        raise WorkerError(f"{url}: the answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise WorkerError(f"{url}: expected a JSON object, got {type(answer).__name__}")
    return answer


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 404 and url.endswith("/eldr/info"):
        return (
            f"{url}: 404; the server runs without ELDR. Patch its vLLM (`eldr patch apply`) and "
            'start it with --additional-config \'{"eldr": {"role": "prefill"}}\''
        )
    detail = error.read(500).decode("utf-8", "replace").strip()
    return f"{url}: HTTP {error.code}: {detail or error.reason}"
