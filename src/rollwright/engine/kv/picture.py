"""A plan for people: lines of text, and a picture as SVG.

Role: shows what `plan` computed. Neighbours: the command prints and writes it. Invariants: nothing is
computed here but places; text is escaped; the SVG needs no font, script or network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rollwright.engine.kv.plan import Plan
from rollwright.engine.kv.sizes import told

WIDTH, HEIGHT = 760, 560
LEFT, RIGHT = 84, 724
INK, GRID, ALONE, SHARED, RATE, WEIGHTS, SPARE = (
    *("#1f2933", "#cbd2d9", "#d64545", "#2b8a6b", "#3568b8", "#7b8794", "#f0b429"),
)
BAR = 48
"""Characters of the memory bar in a terminal."""

Point = tuple[int, int, int, float]
"""(sequences, bytes alone, bytes shared, tokens per second); see `plan.curve`."""


def lines(plan: Plan) -> Iterator[str]:
    """The plan, line by line."""
    traffic = plan.traffic
    yield f"{plan.model}: {plan.parameters / 1e9:.3g} billion weights, context {plan.context:,}"
    if plan.tensor_parallel > 1:
        yield _row("devices", f"{plan.tensor_parallel}; all figures are of one")
    yield _row("traffic", _traffic(plan))
    yield ""
    for kind in plan.kinds:
        span = f" of {kind.span:,}" if kind.span else ""
        costs = [f"{kind.token_bytes:,} bytes a token"] if kind.token_bytes else []
        costs += [f"{told(kind.state_bytes)} a sequence"] if kind.state_bytes else []
        yield _row(f"{kind.layers} × {kind.kind.value}{span}", ", ".join(costs) or "nothing")
    yield _row("a token, all layers", f"{plan.token_bytes:,} bytes ({plan.kv}, blocks of {plan.block})")
    yield _row(f"a sequence of {plan.context:,}", told(plan.sequence_bytes))
    yield ""
    yield _row("memory", told(plan.memory))
    yield _row(f"  weights ({plan.dtype})", told(plan.weights))
    yield _row("  activations, reserve", f"{told(plan.activations)}, {told(plan.reserve)}")
    yield _row("  left for KV", told(plan.budget))
    yield _row("", _bar(plan))
    yield _row("sequences that fit", f"{plan.fits:,}; {plan.fits_shared:,} where prefixes are shared")
    yield _row("longest context", f"{plan.longest_one:,} for one sequence")
    yield _row(
        "  worth allowing",
        f"{plan.longest:,}, so that {plan.wanted} fit{'s' if plan.wanted == 1 else ''} at once",
    )
    yield _row("prefix hits expected", f"{100 * plan.hit_rate:.1f} % of prompt tokens")
    saved = 1 - plan.shared_bytes / plan.alone_bytes if plan.alone_bytes else 0.0
    yield _row(
        f"KV of {plan.wanted} sequence{'' if plan.wanted == 1 else 's'}",
        f"{told(plan.alone_bytes)} alone, {told(plan.shared_bytes)} shared ({100 * saved:.0f} % saved)",
    )
    if plan.knee is not None and plan.knee_rate is not None and plan.first_rate is not None:
        yield _row(
            "knee",
            f"{plan.knee:,} sequences: {plan.knee_rate:,.0f} tokens/s, one alone {plan.first_rate:,.0f}",
        )
    yield _row("at once, worth having", f"{plan.advised:,} (of {traffic.mean:,} tokens on average)")
    for note in plan.notes:
        yield f"note: {note}"


def _traffic(plan: Plan) -> str:
    traffic = plan.traffic
    text = f"prompt {traffic.prompt:,}"
    if traffic.shared:
        text += f" ({traffic.shared:,} common to all)"
    text += f", {traffic.turns} × {traffic.sampled:,} sampled"
    if traffic.turns > 1:
        text += f", {traffic.observed:,} observed between"
    return text + (f", groups of {traffic.group}" if traffic.group > 1 else "")


def _row(name: str, text: str) -> str:
    return f"{name:<34}{text}".rstrip()


def _bar(plan: Plan) -> str:
    """Weights, activations and reserve, KV of the wanted sequences with sharing, what is free."""
    parts = (
        ("w", plan.weights),
        ("a", plan.activations + plan.reserve),
        ("k", min(plan.shared_bytes, plan.budget)),
    )
    text = "".join(letter * round(BAR * size / plan.memory) for letter, size in parts)[:BAR]
    return f"[{text:·<{BAR}}] w weights, a activations and reserve, k KV of {plan.wanted}"


def svg(plan: Plan, points: Sequence[Point]) -> str:
    """Memory as a bar; KV against sequences, alone and shared, with the memory's end; tokens per second with
    the knee."""
    most = points[-1][0]
    rated = any(rate for *_, rate in points)
    body = [
        _text(LEFT, 30, f"{plan.model}: KV memory and throughput", 17, weight="600"),
        _text(LEFT, 50, f"{plan.kv}, context {plan.context:,}; {_traffic(plan)}", 12),
        *_memory(plan),
        *_chart(plan, points, most, 140, 330 if rated else 500),
    ]
    if rated:
        body += _rates(plan, points, most, 380, 510)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" fill="{INK}"><rect width="100%" height="100%" '
        f'fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _memory(plan: Plan) -> Iterator[str]:
    at = float(LEFT)
    spare = plan.activations + plan.reserve
    kv = min(plan.shared_bytes, plan.budget)
    parts = (("weights", plan.weights, WEIGHTS), ("activations, reserve", spare, SPARE))
    for name, size, colour in (*parts, (f"KV of {plan.wanted}", kv, SHARED)):
        width = (RIGHT - LEFT) * size / plan.memory
        yield f'<rect x="{at:.1f}" y="64" width="{width:.1f}" height="20" fill="{colour}"/>'
        if size and width > 60 and colour != SHARED:
            yield _text(at + 4, 98, f"{name} {told(size)}", 11)
        at += width
    yield f'<rect x="{LEFT}" y="64" width="{RIGHT - LEFT}" height="20" fill="none" stroke="{INK}"/>'
    told_kv = f"KV of {plan.wanted} {told(plan.shared_bytes)}, of {told(plan.memory)} in all"
    yield _text(RIGHT, 98, told_kv, 11, "end")


def _chart(plan: Plan, points: Sequence[Point], most: int, top: int, bottom: int) -> Iterator[str]:
    high = 1.25 * max(plan.budget, 1)

    def place(count: float, size: float) -> str:
        return f"{_x(count, most):.1f},{bottom - (bottom - top) * min(1.0, size / high):.1f}"

    yield _frame(top, bottom)
    yield _text(LEFT, top - 8, "bytes of KV against sequences at once", 12, weight="600")
    level = bottom - (bottom - top) * plan.budget / high
    ends = f'x1="{LEFT}" x2="{RIGHT}" y1="{level:.1f}" y2="{level:.1f}"'
    yield f'<line {ends} stroke="{INK}" stroke-dasharray="5 4"/>'
    yield _text(LEFT - 6, level + 4, told(plan.budget), 11, "end")
    for index, colour in ((1, ALONE), (2, SHARED)):
        drawn = [point for point in points if point[index] <= high]
        path = " ".join(place(point[0], point[index]) for point in drawn)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    yield _text(RIGHT - 6, bottom - 26, f"nothing shared: {plan.fits:,} fit", 12, "end", colour=ALONE)
    yield _text(RIGHT - 6, bottom - 10, f"prefixes shared: {plan.fits_shared:,}", 12, "end", colour=SHARED)
    yield from _axis(most, bottom)


def _rates(plan: Plan, points: Sequence[Point], most: int, top: int, bottom: int) -> Iterator[str]:
    high = 1.1 * max(rate for *_, rate in points)

    def y(rate: float) -> float:
        return bottom - (bottom - top) * rate / high

    yield _frame(top, bottom)
    yield _text(LEFT, top - 8, "tokens per second of the whole batch, by the cost model", 12, weight="600")
    path = " ".join(f"{_x(count, most):.1f},{y(rate):.1f}" for count, _, _, rate in points)
    yield f'<polyline points="{path}" fill="none" stroke="{RATE}" stroke-width="2"/>'
    yield _text(LEFT - 6, top + 10, f"{high / 1.1:,.0f}", 11, "end")
    if plan.knee is not None and plan.knee_rate is not None and plan.knee <= most:
        x, level = _x(plan.knee, most), y(plan.knee_rate)
        yield f'<circle cx="{x:.1f}" cy="{level:.1f}" r="4.5" fill="{RATE}"/>'
        yield _text(x + 8, level + 16, f"knee: {plan.knee:,}, {plan.knee_rate:,.0f} tokens/s", 12)
    yield from _axis(most, bottom)


def _x(count: float, most: int) -> float:
    return LEFT + (RIGHT - LEFT) * count / most


def _frame(top: int, bottom: int) -> str:
    size = f'width="{RIGHT - LEFT}" height="{bottom - top}"'
    return f'<rect x="{LEFT}" y="{top}" {size} fill="none" stroke="{GRID}"/>'


def _axis(most: int, bottom: int) -> Iterator[str]:
    for part in range(5):
        count = most * part / 4
        yield _text(_x(count, most), bottom + 16, f"{count:,.0f}", 11, "middle")


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "start", *, weight: str = "400", colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
