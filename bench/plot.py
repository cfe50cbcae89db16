"""Lines on two logarithmic axes, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#1b6ca8", "#d1495b", "#5a9367", "#8d6a9f")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 360, 70, 40, 140, 50


def save(path: Path, title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    points = [point for line in lines.values() for point in line]
    axes = [(math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)))) for v in zip(*points, strict=True)]
    (x0, x1), (y0, y1) = axes

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / max(x1 - x0, 1)
        up = (math.log10(y) - y0) / max(y1 - y0, 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    parts.append(f'<text x="{LEFT}" y="22" font-size="15">{title}</text>')
    for decade in range(x0, x1 + 1):
        (x, low), (_, high) = at(10.0**decade, 10.0**y0), at(10.0**decade, 10.0**y1)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{low + 16:.1f}" font-size="11" text-anchor="middle">10^{decade}</text>')
    for decade in range(y0, y1 + 1):
        (left, y), (right, _) = at(10.0**x0, 10.0**decade), at(10.0**x1, 10.0**decade)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" font-size="11" text-anchor="end">10^{decade}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" font-size="12">{x_name}</text>')
    parts.append(f'<text x="14" y="{TOP - 8}" font-size="12">{y_name}</text>')
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        places = [at(x, y) for x, y in line]
        path_data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="{path_data}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        x, y = places[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" font-size="12" fill="{colour}">{name}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]))
