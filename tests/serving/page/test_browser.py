"""The page in a real browser: it draws every part, and a client's text never becomes markup."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from eldr.serving import operator_page
from eldr.serving.page import build, numbers, render
from eldr.serving.page.facts import of_row
from eldr.serving.page.heat import heat
from eldr.serving.page.window import Window
from tests.serving.page.devtools import CHROMIUM, FLAGS, open_tab
from tests.serving.page.rows import EVIL, fallback, marginal, row
from tests.serving.page.test_numbers import ONE, counters, status
from tests.serving.rig import rig

imread = pytest.importorskip("matplotlib.image").imread
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
DARK = ("--blink-settings=preferredColorScheme=0",)


def chromium(folder: Path, html: str, *flags: str, anchor: str = "") -> str:
    """Opens the document; what Chromium printed."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    return browse(folder, f"file://{page}{anchor}", "--virtual-time-budget=2000", *flags)


def browse(folder: Path, url: str, *flags: str) -> str:
    """Opens an address; what Chromium printed."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, url]
    done = subprocess.run(
        command, capture_output=True, timeout=120, env={**os.environ, "TZ": "UTC"}
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


def sample(request_id: str = "req-1") -> dict:
    """Data of every part, from the data functions themselves."""
    window = Window(2)
    window.poll(0.0, {"http://d0:8200": ONE, "http://d1:8200": ONE})
    window.tick(status(**{"http://d0:8200": (3, 4.0), "http://d1:8200": (1, 3.0)}), {})
    later = counters(3, [[3, 1, 1], [1, 2, 1]], {"1": [2, 4], "3": [1, 5]})
    window.poll(4.0, {"http://d0:8200": later, "http://d1:8200": later})
    rows = [row(request_id=request_id), marginal(request_id="req-2"), fallback(request_id="req-3")]
    data = build.live(
        name="router:8000",
        now=1_800_000_000.0,
        policy="locality_band",
        total=3,
        facts=[of_row(r) for r in rows],
        rows=rows,
        load=window.load(),
        experts=numbers.experts(window.realised(), 3.0, {"round_robin": 4.0}),
        pairs=list(window.pairs),
        heat_map=heat(window.changes(), None, {}),
        window=window.span(),
    )
    data["source"]["kind"] = "snapshot"
    return data


def text_of(dom: str) -> str:
    """The text of what was drawn, without scripts and tags."""
    body = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", dom)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_every_part_is_drawn(tmp_path: Path) -> None:
    dom = chromium(tmp_path, render.page(sample()), "--dump-dom", anchor="#request=req-1")
    text = text_of(dom)
    for shown in (
        "1.0 of 3 realised",
        "25 % fewer than round_robin",
        "estimate",
        "± 0.75 experts (MAE)",
        "80 µs",
        "3 on d0:8200, mean 2",
        "fallback: no_signature 1",
        "was the least loaded of 2 in the similarity band",
        "✓ chosen",
        "over the last 4 s",
    ):
        assert shown in text, f"{shown!r} not in {text[:3000]}"
    assert dom.count('class="map"') == 2
    assert dom.count("<circle") == 2
    assert 'aria-expanded="true"' in dom


def test_text_of_a_client_is_shown_as_text(tmp_path: Path) -> None:
    data = sample(EVIL)
    data["source"]["name"] = data["policy"][0] = EVIL
    dom = chromium(tmp_path, render.page(data), "--dump-dom")
    assert "<title>ELDR</title>" in dom
    assert "<img" not in dom.replace("\\u003cimg", "")
    assert "img src=x onerror" in text_of(dom)


def test_single_layers_of_a_file_are_drawn(tmp_path: Path) -> None:
    """The layer picker offers what the file holds; the map and the readout follow it."""
    data = sample() | {"layers": {"0": {"cells": "/AAA/A", "distinct": [1.0, 1.0]}}}
    html = render.page(data).replace(
        "</body>",
        "<pre id=out></pre></body>",
    )
    html = html.replace(render.policy(), "default-src * 'unsafe-inline'")
    script = (
        "<script>const s=document.querySelector('#layer');"
        "const said=[...s.options].map(o=>o.value).join();s.value='0';"
        "s.dispatchEvent(new Event('change'));"
        "const label=()=>document.querySelector('canvas.map').getAttribute('aria-valuetext');"
        "document.querySelector('#out').textContent=said+' '+label();</script></body>"
    )
    dom = chromium(tmp_path, html.replace("</body>", script), "--dump-dom")
    assert "all,0 d0:8200 read expert 0 in every step" in text_of(dom)


async def test_differences_and_the_keyboard(tmp_path: Path) -> None:
    """Differences to the mean say their scale; a redraw keeps the expert that a reader is at."""
    page = tmp_path / "page.html"
    page.write_text(render.page(sample()), encoding="utf-8")
    async with open_tab(tmp_path, f"file://{page}") as tab:
        low = "document.querySelector('#scale-low').textContent"
        assert await tab.js(low) == "never"
        await tab.js("document.querySelector('canvas.map').focus()")
        await tab.key("ArrowRight")
        said = "document.activeElement.getAttribute('aria-valuetext')"
        first = await tab.js(said)
        assert "read expert" in first
        await tab.js("document.querySelector('#contrast').click()")
        await tab.until(f"{low} !== 'never'")
        assert "points rarer than the mean" in await tab.js(low)
        assert await tab.js(said) == first
        assert await tab.js("document.activeElement.getAttribute('aria-valuenow')") == "1"


def test_log_without_counters_is_drawn(tmp_path: Path) -> None:
    dom = chromium(tmp_path, render.page(build.from_log([row()], "run.jsonl")), "--dump-dom")
    assert text_of(dom).count("this log holds no decode counters") >= 3


@pytest.mark.parametrize("flags", [("--window-size=1280,900",), ("--window-size=500,900", *DARK)])
def test_screenshot(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A picture of the asked size with the colours of its scheme, and not an empty one."""
    shot = tmp_path / "shot.png"
    chromium(tmp_path, render.page(sample()), f"--screenshot={shot}", *flags)
    pixels = (imread(shot)[..., :3] * 255).astype(int)
    width, height = map(int, flags[0].partition("=")[2].split(","))
    assert pixels.shape == (height, width, 3)
    assert (pixels[0, 0].sum() < 200) == (DARK[0] in flags)
    assert len(np.unique(pixels.reshape(-1, 3)[::7], axis=0)) > 20


async def test_live_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events reach the page under its own security policy; a keyboard opens a decision."""
    monkeypatch.setattr(operator_page, "SEND_SECONDS", 0.1)
    async with rig(1, 2) as r:
        await r.complete()
        async with open_tab(tmp_path, r.url + "/eldr/") as tab:
            await tab.until("document.querySelector('#status').className === 'live'")
            assert "1 decisions" in await tab.js("document.querySelector('#source').textContent")
            await r.complete()
            await tab.until("document.querySelectorAll('#decisions tbody tr').length === 2")
            await tab.js("document.querySelector('#decisions button').focus()")
            await tab.key("Enter")
            await tab.until("document.querySelector('tr.detail')")
            detail = await tab.js("document.querySelector('tr.detail').textContent")
            assert "fewest running requests per weight of 2 candidates" in detail
            await r.complete()  # the next event draws anew: what is open and focused stays
            await tab.until("document.querySelectorAll('#decisions button').length === 3")
            assert await tab.js("document.querySelectorAll('tr.detail').length") == 1
            assert await tab.js("document.activeElement.getAttribute('aria-expanded')") == "true"
            await tab.js("document.querySelector('#pause').click()")
            assert await tab.js("document.querySelector('#status').textContent") == "paused"


async def test_live_page_asks_for_the_key(tmp_path: Path) -> None:
    async with rig(1, 1, admin_key="s3cret") as r, open_tab(tmp_path, r.url + "/eldr/") as tab:
        await tab.until("!document.querySelector('#login').hidden")
        assert await tab.js("document.querySelector('#main').hidden") is True
        for key, said in (("wrong", "this key is not accepted"), ("s3cret", "live")):
            await tab.js(f"document.querySelector('#key').value = '{key}'")
            await tab.js("document.querySelector('#login button').click()")
            await tab.until(f"document.querySelector('#status').textContent === '{said}'")
        assert await tab.js("document.querySelector('#login').hidden") is True


async def test_heat_map_is_read_by_keyboard(tmp_path: Path) -> None:
    """Arrow keys walk over a worker's experts and say what they read."""
    page = tmp_path / "page.html"
    page.write_text(render.page(sample()), encoding="utf-8")
    async with open_tab(tmp_path, f"file://{page}") as tab:
        await tab.until("document.querySelector('canvas.map')")
        await tab.js("document.querySelector('canvas.map').focus()")
        await tab.key("ArrowRight")
        said = await tab.js("document.querySelector('#heat-readout').textContent")
        assert said.startswith("d0:8200 read expert ")
        now = await tab.js("document.activeElement.getAttribute('aria-valuetext')")
        assert now == said
        unnamed = "[...document.querySelectorAll('button,select,input,canvas.map,svg[role=img]')]"
        unnamed += ".filter((e) => !(e.ariaLabel || e.textContent || e.labels?.length)).length"
        assert await tab.js(unnamed) == 0
