"""Lines on two axes, logarithmic or not, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#1b6ca8", "#d1495b", "#5a9367", "#8d6a9f")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 360, 70, 40, 140, 50


class _Axis:
    """Where values are between the ends of an axis, 0 to 1, and its marks."""

    def __init__(self, values: Sequence[float], logarithmic: bool) -> None:
        self._value = math.log10 if logarithmic else float
        low, high = self._value(min(values)), self._value(max(values))
        step = 1.0 if logarithmic else 10.0 ** math.floor(math.log10(max(high - low, 1e-9)))
        if not logarithmic and (high - low) / step < 4:
            step /= 2
        first, last = math.floor(low / step), math.ceil(high / step)
        last = max(last, first + 1)
        self._ends = first * step, last * step
        texts = [f"10^{i}" if logarithmic else f"{i * step:.4g}" for i in range(first, last + 1)]
        self.marks = [(i / (last - first), text) for i, text in enumerate(texts)]

    def at(self, value: float) -> float:
        return (self._value(value) - self._ends[0]) / (self._ends[1] - self._ends[0])


def save(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    logarithmic: tuple[bool, bool] = (True, True),
) -> None:
    """Draw named lines of (x, y); each name stands at the end of its line."""
    columns = zip(*(point for line in lines.values() for point in line), strict=True)
    x_axis, y_axis = (_Axis(values, scale) for values, scale in zip(columns, logarithmic, strict=True))

    def across(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    parts.append(f'<text x="{LEFT}" y="22" font-size="15">{title}</text>')
    for share, text in x_axis.marks:
        x, low = across(share), up(0)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{up(1):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{low + 16:.1f}" font-size="11" text-anchor="middle">{text}</text>')
    for share, text in y_axis.marks:
        left, y = across(0), up(share)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{across(1):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" font-size="11" text-anchor="end">{text}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" font-size="12">{x_name}</text>')
    parts.append(f'<text x="14" y="{TOP - 8}" font-size="12">{y_name}</text>')
    names = []
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        places = [(across(x_axis.at(x)), up(y_axis.at(y))) for x, y in line]
        path_data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="{path_data}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        names.append((places[-1][1], places[-1][0], name, colour))
    lowest = -math.inf
    for y, x, name, colour in sorted(names):  # beside the ends of their lines, and not over one another
        lowest = max(y, lowest + 14)
        parts.append(f'<text x="{x + 8:.1f}" y="{lowest + 4:.1f}" font-size="12" fill="{colour}">{name}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]))
