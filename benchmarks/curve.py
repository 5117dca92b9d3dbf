"""A curve as SVG: how many times faster, over the length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 560, 320, 48


def draw(points: Sequence[tuple[int, float]], path: Path) -> None:
    """Write (prompt tokens, ratio) points as a picture; both axes are logarithmic."""
    xs, ys = [math.log2(x) for x, _ in points], [math.log2(max(y, 0.1)) for _, y in points]
    low, high = min(0.0, *ys), max(1.0, *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / max(xs[-1] - xs[0], 1e-9)
        up = (y - low) / (high - low)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    spots = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    _, same = place(xs[0], 0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">Generated tokens per CPU second, × generate that computes every turn'
        " anew</text>",
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{same:.1f}" y2="{same:.1f}" stroke="#999" '
        'stroke-dasharray="4"/>',
        f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="2"/>',
    ]
    for (x, y), (tokens, ratio) in zip(spots, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f5fa8"/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle">{ratio:.1f}×</text>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 22}" text-anchor="middle">{tokens} tokens</text>'
        )
    path.write_text("\n".join((*parts, "</svg>", "")))
