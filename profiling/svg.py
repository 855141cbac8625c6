"""Drawings for the report: the lanes of one step, and a scatter plot with its line."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from profiling.decode_log import Fit, Point
from profiling.timeline import ELDR, ENGINE, Bar, Lane, Strip

_WIDTH, _LEFT, _RIGHT = 1120, 130, 16
_LANE, _GAP, _TOP = 26, 8, 30
_PLOT = (560, 320, 60, 20)  # width, height, left and bottom margin, top margin


def step_strip(strip: Strip) -> str:
    """The lanes as inline SVG; colours come from the page's classes."""
    height = _TOP + len(strip.lanes) * (_LANE + _GAP) + 4
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(strip.title)}">',
        f'<text class="axis" x="0" y="14">{_length(strip.length)}</text>',
        *_time_axis(strip.length, height),
    ]
    for number, lane in enumerate(strip.lanes):
        parts += _lane(lane, _TOP + number * (_LANE + _GAP), strip.length)
    return "\n".join([*parts, "</svg>"])


def _length(time: int) -> str:
    return f"{time / 1e6:.2f} ms" if time >= 1_000_000 else f"{time / 1e3:.1f} us"


def _scale(length: int) -> float:
    return (_WIDTH - _LEFT - _RIGHT) / max(1, length)


def _time_axis(length: int, height: int) -> list[str]:
    parts, tick = [], _tick(length / 1e6, 8)
    time = 0.0
    while time <= length / 1e6 + 1e-9:
        x = _LEFT + time * 1e6 * _scale(length)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{height}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="14">{time:g} ms</text>')
        time = round(time + tick, 9)
    return parts


def _tick(span: float, most: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts a span into at most `most` parts."""
    tick = 1e-6
    while span / tick > most:
        tick *= 2.5 if f"{tick:e}"[0] == "2" else 2
    return tick


def _lane(lane: Lane, top: int, length: int) -> list[str]:
    parts = [f'<text class="lane" x="{_LEFT - 8}" y="{top + _LANE / 2 + 4}">{lane.title}</text>']
    scale = _scale(length)
    engine_first = sorted(
        _merged(lane.bars, scale), key=lambda bar: (bar.kind != ENGINE, bar.start)
    )
    for bar in engine_first:
        start, end = max(0, bar.start), min(length, bar.end)
        width = max(1.2, (end - start) * scale)
        x = _LEFT + start * scale
        inset = 0 if bar.kind != ENGINE else 4
        parts.append(
            f'<rect class="{bar.kind}" x="{x:.2f}" y="{top + inset}" width="{width:.2f}" '
            f'height="{_LANE - 2 * inset}" rx="1.5"><title>{escape(bar.name)}: '
            f"{(bar.end - bar.start) / 1e3:.1f} us</title></rect>"
        )
        if bar.kind == ELDR and width > 7 * len(bar.name):  # room for its name
            middle, base = x + width / 2, top + _LANE / 2 + 4
            parts.append(
                f'<text class="label" x="{middle:.1f}" y="{base:.0f}">{escape(bar.name)}</text>'
            )
    return parts


def _merged(bars: list[Bar], scale: float) -> list[Bar]:
    """Engine bars closer than half a pixel become one, so that a step of thousands stays small."""
    merged = list[Bar]()
    for bar in sorted(bars, key=lambda b: (b.kind, b.start)):
        last = merged[-1] if merged else None
        if last and last.kind == bar.kind == ENGINE and (bar.start - last.end) * scale < 0.5:
            name = last.name if last.name == bar.name else "several"
            merged[-1] = Bar(last.start, max(last.end, bar.end), ENGINE, name)
        else:
            merged.append(bar)
    return merged


def scatter(points: list[Point], fit: Fit | None) -> str:
    """Step time against distinct experts; the area of a dot is the number of steps behind it."""
    width, height, margin, top = _PLOT
    xs, ys = [p.distinct for p in points], [p.milliseconds for p in points]
    low_x, high_x = _padded(xs)
    low_y, high_y = _padded(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) * (width - margin - 16)
        up = (y - low_y) / (high_y - low_y) * (height - margin - top)
        return margin + across, height - margin - up

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="step time">']
    parts += _axes(place, (low_x, high_x), (low_y, high_y))
    most = max(p.steps for p in points)
    for p in points:
        x, y = place(p.distinct, p.milliseconds)
        radius = 2 + 4 * (p.steps / most) ** 0.5
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
            f"<title>{p.steps} steps, {p.tokens:.1f} tokens per step</title></circle>"
        )
    if fit is not None:
        (x1, y1), (x2, y2) = (place(x, fit.base + fit.slope * x) for x in (min(xs), max(xs)))
        parts.append(f'<line class="fit" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    return "\n".join([*parts, "</svg>"])


def _padded(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.5
    return low - pad, high + pad


def _axes(
    place: Callable[[float, float], tuple[float, float]],
    x_span: tuple[float, float],
    y_span: tuple[float, float],
) -> list[str]:
    width, height, margin, top = _PLOT
    parts = []
    for low, high, horizontal in ((*x_span, True), (*y_span, False)):
        tick = _tick(high - low, 6)
        value = (low // tick + 1) * tick
        while value < high:
            x, y = place(value, y_span[0]) if horizontal else place(x_span[0], value)
            if horizontal:
                parts.append(
                    f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y:.1f}"/>'
                )
                parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 16:.1f}">{value:g}</text>')
            else:
                parts.append(
                    f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{width - 16}" y2="{y:.1f}"/>'
                )
                parts.append(f'<text class="lane" x="{x - 8:.1f}" y="{y + 4:.1f}">{value:g}</text>')
            value = round(value + tick, 9)
    middle = margin + (width - margin) / 2
    parts.append(
        f'<text class="tick" x="{middle:.0f}" y="{height - 12}">distinct experts per layer and step'
        "</text>"
    )
    parts.append(f'<text class="axis" x="{margin}" y="12">ms per step</text>')
    return parts
