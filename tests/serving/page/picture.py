"""Makes the operator page's picture for the documents, from a router that serves a real trace.

    python -m tests.serving.page.picture docs/img/operator-page.png

One mock prefill and four mock decode workers replay the bundled trace (real signatures, really
counted steps) behind a real router with a fitted partition; then Chromium draws the page.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from eldr.serving.page import render
from tests.serving.page.test_browser import chromium
from tests.serving.page.traced import TracedDecode, TracedPrefill, drive, fitted
from tests.serving.rig import Rig, rig

WORKERS, CLIENTS, STEP_SECONDS, WATCH_SECONDS = 4, 32, 0.06, 60.0


async def watched(folder: Path) -> dict[str, Any]:
    """The page's data after a minute of traffic with somebody looking."""
    decode = [TracedDecode(STEP_SECONDS) for _ in range(WORKERS)]
    options: dict[str, Any] = {
        "policy": "locality_band",
        "partition": fitted(folder, WORKERS),
        "shadow": ("least_requests", "round_robin"),
        "tau": 0.3,
    }
    async with rig([TracedPrefill(cached=19)], decode, **options) as r:
        load = asyncio.create_task(drive(r, 100_000, CLIENTS, tokens=60))
        viewer = asyncio.create_task(_look(r))
        await asyncio.sleep(WATCH_SECONDS)
        async with r.client.get(r.url + "/eldr/data") as response:
            data: dict[str, Any] = await response.json()
        for task in (load, viewer):
            task.cancel()
        await asyncio.gather(load, viewer, return_exceptions=True)
    data["source"] |= {"kind": "snapshot", "name": "example router"}
    return data


async def _look(r: Rig) -> None:
    async with r.client.get(r.url + "/eldr/events", timeout=None) as response:
        async for _ in response.content:
            pass


def main(output: str) -> None:
    """Draws the page, with a decision opened."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = asyncio.run(watched(folder))
        opened = next(d for d in data["decisions"] if d["branch"] in ("band", "nearest"))
        shot = f"--screenshot={Path(output).absolute()}"
        anchor = f"#request={opened['request_id']}"
        html = render.page(data)
        chromium(folder, html, shot, "--window-size=1280,1330", anchor=anchor)
        (Path(tempfile.gettempdir()) / "operator-page.html").write_text(html, encoding="utf-8")
    print(data["numbers"])


if __name__ == "__main__":
    main(sys.argv[1])
