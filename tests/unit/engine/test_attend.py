"""Attention in parts is attention: whatever lies in rows or on paths, whatever the windows and groupings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollwright.engine.embedded import attend as module
from rollwright.engine.embedded.attend import StepAttend
from rollwright.engine.embedded.kv import KV
from rollwright.engine.embedded.partial import partial, plain
from rollwright.engine.embedded.plan import Chunk, draw
from rollwright.engine.embedded.radix import Node
from rollwright.model.base import Shape

DIM, LAYERS = 4, 2


def made(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from(["", "causal", "mask"]),
)
def test_both_kernels_give_the_output_and_the_log_of_the_sum(
    groups: int, kv_heads: int, n: int, m: int, what: str
) -> None:
    q, k, v = (
        made(0, 1, groups * kv_heads, n, DIM),
        made(1, 1, kv_heads, m, DIM),
        made(2, 1, kv_heads, m, DIM),
    )
    mask = None
    seen = torch.ones(n, m, dtype=torch.bool)
    if what == "causal":
        seen = seen.tril()
    elif what == "mask":
        seen = made(3, n, m) > 0
        seen[:, 0] = True
        mask = torch.where(seen, 0.0, -torch.inf)
    scores = (q.double() @ k.double().repeat_interleave(groups, 1).transpose(-1, -2)) * 0.3
    scores = scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v.double().repeat_interleave(groups, 1)
    for kernel in (partial, plain):
        if kernel is plain and groups > 1:
            continue  # `partial` repeats the heads for it
        found, weight = kernel(q, k, v, 0.3, mask=mask, causal=what == "causal")
        assert (found - out).abs().max() < 1e-5
        assert (weight - scores.logsumexp(-1)).abs().max() < 1e-5


@st.composite
def situations(draw_: st.DrawFn) -> tuple[int, int, tuple[int | None, ...], list[list[int]], list[list[int]]]:
    """KV heads, groups, windows; nodes as [parent or -1, tokens]; rows as [node or -1, in the row, new]."""
    nodes: list[list[int]] = []
    for i in range(draw_(st.integers(0, 4))):
        nodes.append([draw_(st.integers(-1, i - 1)), draw_(st.integers(1, 9))])
    rows = [
        [
            draw_(st.integers(-1, len(nodes) - 1)),
            draw_(st.integers(0, 12)),
            draw_(st.sampled_from([0, 1, 1, 1, 2, 7])),  # 0 is a row that does nothing in this step
        ]
        for _ in range(draw_(st.integers(1, 5)))
    ]
    if not any(new for _, _, new in rows):
        rows[0][2] = 1
    window = st.sampled_from([None, None, 1, 2, 5, 11])
    windows = tuple(draw_(window) for _ in range(LAYERS))
    return draw_(st.sampled_from([1, 2])), draw_(st.integers(1, 3)), windows, nodes, rows


@pytest.mark.parametrize("small", [0, 1 << 15])
def test_each_token_sees_its_history_up_to_itself_once(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", small)

    @settings(deadline=None, max_examples=150)
    @given(situations())
    def check(
        situation: tuple[int, int, tuple[int | None, ...], list[list[int]], list[list[int]]],
    ) -> None:
        _check(*situation)

    check()


def _check(
    kv_heads: int,
    groups: int,
    windows: tuple[int | None, ...],
    nodes: list[list[int]],
    rows: list[list[int]],
) -> None:
    shape = Shape(
        layers=LAYERS,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=DIM,
        context=99,
        scale=0.7,
        windows=windows,
    )
    tree = [Node(b"", None, None, 0)]
    for i, (parent, tokens) in enumerate(nodes):
        block = made(10 + i, LAYERS, 2, kv_heads, tokens, DIM)
        tree.append(Node(bytes([i]) * 4 * tokens, block, tree[parent + 1], 0))
    kv = KV(shape, torch.device("cpu"), torch.float32)
    kv.reserve(len(rows), 64, 0)
    kv.table.copy_(made(5, *kv.table.shape))  # what is not the row's own must not be seen
    paths = [tree[node + 1] if node >= 0 else None for node, _, _ in rows]
    base = np.array([path.end if path else 0 for path in paths], np.int64)
    computed = base + np.array([own for _, own, _ in rows])
    before = kv.table.clone()
    decoding = np.array([r for r, (_, _, new) in enumerate(rows) if new == 1], np.int64)
    chunks = [
        Chunk(r, int(computed[r]), int(computed[r]) + new)
        for r, (_, _, new) in reversed(list(enumerate(rows)))
        if new > 1
    ]
    plan = draw(decoding, chunks, computed, base, paths)
    count = len(plan.rows)
    assert count == sum(new for _, _, new in rows)
    attend = StepAttend(kv, plan, torch.from_numpy)
    for layer in range(LAYERS):
        q = made(20 + layer, count, shape.heads, DIM)
        k, v = made(30 + layer, count, kv_heads, DIM), made(40 + layer, count, kv_heads, DIM)
        found = attend(layer, q, k, v)
        for i in range(count):
            row, position = int(plan.rows[i]), int(plan.positions[i])
            path = paths[row]
            parts = [e.block[layer] for e in reversed(list(path.up()))] if path else []  # type: ignore[index]
            mine = [j for j in range(count) if plan.rows[j] == row and plan.positions[j] <= position]
            parts.append(before[layer, :, row, :, : computed[row] - base[row]])
            parts.append(torch.stack((k[mine], v[mine])).transpose(1, 2))
            keys, values = torch.cat(parts, 2).double()
            assert keys.shape[1] == position + 1
            window = windows[layer]
            if window is not None:
                keys, values = keys[:, -window:], values[:, -window:]
            mine_q = q[i].double().view(kv_heads, groups, DIM)
            expected = ((mine_q @ keys.transpose(1, 2)) * 0.7).softmax(-1) @ values
            assert (found[i].double() - expected.view(-1, DIM)).abs().max() < 1e-5
        written = kv.table[layer, :, plan.rows, :, plan.places]
        assert torch.equal(written, torch.stack((k, v), 1)), "written elsewhere"
    kv.table[:, :, plan.rows, :, plan.places] = before[:, :, plan.rows, :, plan.places]
    assert torch.equal(kv.table, before), "more was written than the planned tokens"
