"""A headless Chromium that tests talk to over the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Tab:
    """One page; every call waits for its answer."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
        raise AssertionError(f"Chromium went away during {method}")

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 90.0) -> None:
        """Waits for a condition in the page."""
        async with asyncio.timeout(seconds):
            while not await self.js(f"Boolean({expression})"):
                await asyncio.sleep(0.02)

    async def key(self, name: str) -> None:
        """Presses a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, "ArrowRight": 39}[name]
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **text
            )


@asynccontextmanager
async def open_tab(folder: Path, url: str) -> AsyncIterator[Tab]:
    """Chromium with this address open."""
    profile = folder / "profile"
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            found = await _page(session, profile / "DevToolsActivePort")
            async with session.ws_connect(found, max_msg_size=0) as socket:
                tab = Tab(socket)
                there = "location.href !== 'about:blank' && document.readyState === 'complete'"
                await tab.until(there)
                yield tab
    finally:
        process.kill()
        await process.wait()


async def _page(session: aiohttp.ClientSession, file: Path) -> str:
    async with asyncio.timeout(60):
        while not (file.exists() and "\n" in file.read_text()):
            await asyncio.sleep(0.05)
        port = file.read_text().splitlines()[0]
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                for target in await response.json():
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
