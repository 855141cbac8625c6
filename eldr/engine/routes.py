"""The worker routes, in vLLM's own API server: `GET /eldr/info`, `/eldr/decode`, `/eldr/metrics`.

All ask the engine's worker through the engine client, between two steps, so they answer while
the engine generates. With data parallelism inside one API server vLLM returns the first
engine's answer; give each rank its own server (external load balancing) to see them all.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response

from eldr.engine.config import EngineConfig
from eldr.engine.metrics import CONTENT_TYPE, render
from eldr.engine.patching import installed_series, shipped_series

logger = logging.getLogger("vllm.eldr")

WIRE_VERSION = 1
_TIMEOUT_S = 60.0
router = APIRouter(prefix="/eldr", tags=["eldr"])
admin = APIRouter(prefix="/eldr", tags=["eldr"])


def attach(app: FastAPI, settings: EngineConfig) -> None:
    """Adds the routes to vLLM's FastAPI application; warns if its patches are not this eldr's."""
    if (found := installed_series()) != (ours := shipped_series()):
        logger.warning(
            "ELDR: vLLM holds patch series %s but this eldr brings %s; run `eldr patch apply`",
            found or "(none, or edited)",
            ours,
        )
    app.include_router(router)
    if settings.admin:
        app.include_router(admin)


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """What this worker is: role, model, versions and geometry."""
    state = request.app.state
    if (known := getattr(state, "eldr_info", None)) is None:
        found = await _ask(request, "info")
        known = {"v": WIRE_VERSION, "model": _served_name(state), **_versions(), **found}
        state.eldr_info = known  # nothing in it changes while the engine lives
    answer: dict[str, Any] = known
    return answer


@router.get("/decode")
async def decode(request: Request, window: bool = False) -> dict[str, Any]:
    """Counters over decode steps, cumulative and (on request) over the sliding window.

    404 on a worker that does not count them.
    """
    return await _ask(request, "decode", window)


@router.get("/vectors")
async def vectors(request: Request) -> dict[str, Any]:
    """Which vectors prompts are scored against; digest null while there are none."""
    return await _ask(request, "vectors")


@admin.post("/vectors")
async def replace_vectors(request: Request) -> dict[str, Any]:
    """Replaces them by the body, a file of `eldr.engine.vectors`; an empty body removes them."""
    found = await _ask(request, "load_vectors", await request.body())
    if "error" in found:
        raise HTTPException(400, found["error"])
    return found


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The worker's counters for Prometheus, beside vLLM's own /metrics."""
    return Response(render(await _ask(request, "counters")), media_type=CONTENT_TYPE)


def _served_name(state: Any) -> str:
    """The name under which requests reach the model, which need not be its path."""
    names = state.args.served_model_name or [state.args.model]
    return str(names[0])


async def _ask(request: Request, method: str, *args: Any) -> dict[str, Any]:
    client = getattr(request.app.state, "engine_client", None)
    if client is None:
        raise HTTPException(503, "ELDR: this server has no engine")
    answers = await client.collective_rpc("eldr", timeout=_TIMEOUT_S, args=(method, *args))
    found: dict[str, Any] | None = next((a for a in answers if a is not None), None)
    if found is None:
        raise HTTPException(
            404, f"ELDR: this worker's role has no {method!r}; see /eldr/info for its role"
        )
    return found


def _versions() -> dict[str, Any]:
    """Versions of vLLM and eldr, and the patch series that vLLM's files really hold (or null)."""
    import vllm

    try:
        own = version("eldr")
    except PackageNotFoundError:
        own = None
    return {"vllm": vllm.__version__, "eldr": own, "series": installed_series()}
