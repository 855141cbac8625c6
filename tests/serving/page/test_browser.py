"""The page in a real browser: it draws every part, and a client's text never becomes markup."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from eldr.serving.page import build, numbers, render
from eldr.serving.page.facts import of_row
from eldr.serving.page.heat import heat
from eldr.serving.page.window import Window
from tests.serving.page.rows import EVIL, fallback, marginal, row
from tests.serving.page.test_numbers import ONE, counters, status

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
imread = pytest.importorskip("matplotlib.image").imread
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
DARK = ("--blink-settings=preferredColorScheme=0",)


def chromium(folder: Path, html: str, *flags: str, anchor: str = "") -> str:
    """Opens the document; what Chromium printed."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"]
    command += ["--virtual-time-budget=2000", *flags, f"file://{page}{anchor}"]
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
        "1 of 3 realised",
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


def test_log_without_counters_is_drawn(tmp_path: Path) -> None:
    dom = chromium(tmp_path, render.page(build.from_log([row()], "run.jsonl")), "--dump-dom")
    assert text_of(dom).count("a decision log holds no decode counters") >= 3


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
