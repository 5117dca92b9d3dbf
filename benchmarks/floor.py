"""The bare loop: the fastest eager decoding with a static KV cache that we could write, and nothing else.

Role: the rival of `engine.py`'s cases `floor/…`. Neighbours: takes the weights of our `Decoder`, so that both
compute the same model. What it does not do is what an engine is for: all rows have one length, nothing comes
or goes, nothing is shared, scheduled, streamed or stopped.

What makes it fast: every buffer and every view of a step is made before the clock starts; the norms' weights
and the attention's scale are folded into the matrices behind them; RoPE is one complex product (the halves of
a head are permuted next to each other, in queries and keys alike, which leaves their products as they are)
that writes the rotated key straight into the cache; residual additions happen inside the matrix product. Of
the forms of attention below the fastest for a batch is found by trying. Sampling is the engine's: temperature
1, one uniform a token, inverse CDF, and the drawn token's logprob.

Invariant: `tests/unit/test_benchmarks.py` holds its logits equal to the decoder's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollwright.model.attention import causal, positions
from rollwright.model.decoder import Block, Decoder

FORMS = ("bmm", "bmm-transposed", "flash")
"""Batched products over a growing view of the cache, the same with keys lying transposed, and torch's fused
kernel for a CPU. `scaled_dot_product_attention` takes this kernel too and was never faster."""


@dataclass(frozen=True)
class Layer:
    """One block's weights as the loop multiplies with them, all [in, out]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def interleaved(weight: Tensor, size: int) -> Tensor:
    """Rows of [heads · size, dim] such that the pair (i, i + size/2) of a head becomes (2i, 2i + 1)."""
    halves = weight.view(-1, 2, size // 2, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def folded(block: Block) -> Layer:
    """The block's weights with norms, scale and order of a head folded in."""
    size, heads, kv_heads = block.head_dim, block.heads, block.kv_heads
    qkv = block.qkv.weight * block.attention_norm.weight
    q, k, v = qkv.split((heads * size, kv_heads * size, kv_heads * size))
    qkv = torch.cat((interleaved(q, size) * size**-0.5, interleaved(k, size), v))
    return Layer(
        qkv=qkv.t().contiguous(),
        out=block.out.weight.t().contiguous(),
        gate_up=(block.gate_up.weight * block.ffn_norm.weight).t().contiguous(),
        down=block.down.weight.t().contiguous(),
    )


class Loop:
    """`batch` rows of at most `capacity` tokens, decoded together; `form` is one of `FORMS`."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int, form: str) -> None:
        shape, config = decoder.shape, decoder.config
        self._decoder, self.batch, self._form = decoder, batch, form
        self._heads, self._kv_heads, self._size = shape.heads, shape.kv_heads, shape.head_dim
        self._layers = [folded(block) for block in decoder.blocks]  # type: ignore[arg-type]
        head = decoder.embed.weight if decoder.head is None else decoder.head.weight
        self._head = (head * decoder.norm.weight).t().contiguous()
        half = self._size // 2
        turn = torch.complex(decoder.cos[:capacity, 0, :half], decoder.sin[:capacity, 0, half:])
        self._turn = list(turn)
        kv = (batch, self._kv_heads)
        keys = (self._size, capacity) if form == "bmm-transposed" else (capacity, self._size)
        self._k = [torch.zeros(*kv, *keys) for _ in self._layers]
        self._v = [torch.zeros(*kv, capacity, self._size) for _ in self._layers]
        self._x = torch.empty(batch, config.dim)
        self._normed, self._rms = torch.empty(batch, config.dim), torch.empty(batch, 1)
        self._mean, self._eps = torch.full((config.dim, 1), 1 / config.dim), torch.tensor([config.norm_eps])
        self._q = torch.empty(batch, self._heads * self._size)
        self._qkv = torch.empty(batch, (self._heads + 2 * self._kv_heads) * self._size)
        self._gate_up, self._up = torch.empty(batch, 2 * config.ffn), torch.empty(batch, config.ffn)
        self._logits = torch.empty(batch, decoder.vocab)
        self._ids = torch.zeros(batch, 1, dtype=torch.int64)
        self._steps: dict[int, list[Callable[[], object]]] = {}

    def prefill(self, prompts: Tensor) -> None:
        """Fill the cache with int64[batch, P] prompts but their last token, which the first step takes."""
        rows, length = prompts.shape[0], prompts.shape[1] - 1
        lengths = [length] * rows
        attend = causal(lengths)
        order = torch.arange(self._size).view(2, -1).t().reshape(-1)

        def keeping(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = k.view(rows, length, self._kv_heads, self._size)[..., order].transpose(1, 2)
            if self._form == "bmm-transposed":
                self._k[layer][..., :length] = keys.transpose(2, 3)
            else:
                self._k[layer][:, :, :length] = keys
            self._v[layer][:, :, :length] = v.view(rows, length, self._kv_heads, -1).transpose(1, 2)
            return attend(layer, q, k, v)

        self._decoder.forward(prompts[:, :-1].reshape(-1), positions(lengths), keeping)
        self._ids.copy_(prompts[:, -1:])

    def ready(self, start: int, steps: int) -> None:
        """Make every view that decoding at positions `start` … `start + steps` needs."""
        self._steps = {at: self._calls(at) for at in range(start, start + steps)}

    def decode(self, start: int, steps: int, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw `steps` tokens for each row with uniforms float32[steps, batch, 1]: int64[steps, batch, 1] ids
        and float32[steps, batch, 1] logprobs."""
        ids = torch.empty(steps, self.batch, 1, dtype=torch.int64)
        chosen = torch.empty(steps, self.batch, 1)
        own, last = self._ids, self._head.shape[1] - 1
        for i in range(steps):
            for call in self._steps[start + i]:
                call()
            p = self._logits.softmax(-1)
            torch.searchsorted(p.cumsum(-1), uniforms[i], right=True, out=own)
            own.clamp_(max=last)
            ids[i] = own
            torch.gather(p, 1, own, out=chosen[i])
        return ids, chosen.log_()

    def logits(self, at: int) -> Tensor:
        """float32[batch, V] of the token at position `at`, as the step computes it."""
        self.ready(at, 1)
        for call in self._steps[at]:
            call()
        return self._logits

    def _calls(self, at: int) -> list[Callable[[], object]]:
        """The step at position `at`, one call an operator, on buffers that are all there."""
        calls: list[Callable[[], object]] = []
        flat, table, x = self._ids.view(-1), self._decoder.embed.weight, self._x
        calls.append(partial(torch.index_select, table, 0, flat, out=x))
        for number, layer in enumerate(self._layers):
            self._norm(calls)
            self._attend(calls, number, layer, at)
            self._norm(calls)
            self._feed(calls, layer)
        self._norm(calls)
        normed, head, logits = self._normed, self._head, self._logits
        calls.append(partial(torch.mm, normed, head, out=logits))
        return calls

    def _norm(self, calls: list[Callable[[], object]]) -> None:
        x, y, rms, mean, eps = self._x, self._normed, self._rms, self._mean, self._eps
        calls.append(partial(torch.mul, x, x, out=y))
        calls.append(partial(torch.addmm, eps, y, mean, out=rms))
        calls.append(rms.rsqrt_)
        calls.append(partial(torch.mul, x, rms, out=y))

    def _feed(self, calls: list[Callable[[], object]], layer: Layer) -> None:
        normed, both, wide, x = self._normed, self._gate_up, self._up, self._x
        gate, up = both.chunk(2, dim=-1)
        calls.append(partial(torch.mm, normed, layer.gate_up, out=both))
        calls.append(partial(torch.nn.functional.silu, gate, inplace=True))
        calls.append(partial(torch.mul, gate, up, out=wide))
        calls.append(partial(x.addmm_, wide, layer.down))

    def _attend(self, calls: list[Callable[[], object]], number: int, layer: Layer, at: int) -> None:
        normed, qkv, turn, size = self._normed, self._qkv, self._turn[at], self._size
        pairs = (-1, size // 2, 2)
        q, k, v = qkv.view(self.batch, -1, size).split((self._heads, self._kv_heads, self._kv_heads), 1)
        turned = torch.view_as_complex(self._q.view(self.batch, *pairs))
        q, k_turned = (torch.view_as_complex(x.unflatten(-1, pairs[1:])) for x in (q, k))
        cached_v = self._v[number][:, :, at]
        calls.append(partial(torch.mm, normed, layer.qkv, out=qkv))
        calls.append(partial(torch.mul, q, turn, out=turned))
        if self._form == "bmm-transposed":
            cached_k = self._k[number][..., at]
            calls.append(partial(k_turned.mul_, turn))
            calls.append(partial(cached_k.copy_, k))
        else:
            cached_k = torch.view_as_complex(self._k[number][:, :, at].unflatten(-1, pairs[1:]))
            calls.append(partial(torch.mul, k_turned, turn, out=cached_k))
        calls.append(partial(cached_v.copy_, v))
        self._gather(calls, number, layer.out, at + 1)

    def _gather(self, calls: list[Callable[[], object]], number: int, out: Tensor, seen: int) -> None:
        batch, kv_heads, size, x = self.batch, self._kv_heads, self._size, self._x
        keys, values = self._k[number], self._v[number][:, :, :seen]
        if self._form == "flash":
            keys = keys[:, :, :seen]
            q = self._q.view(batch, kv_heads, -1, size)
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            calls.append(lambda: x.addmm_(flash(q, keys, values, scale=1.0)[0].reshape(batch, -1), out))
            return
        q = self._q.view(batch * kv_heads, -1, size)
        values = values.flatten(0, 1)
        if self._form == "bmm":
            keys = keys.flatten(0, 1)[:, :seen].transpose(1, 2)
        else:
            keys = keys.flatten(0, 1)[..., :seen]
        scores, seen_ = q.new_empty(*q.shape[:2], seen), torch.empty_like(q)
        rows = seen_.view(batch, -1)
        calls.append(partial(torch.bmm, q, keys, out=scores))
        calls.append(partial(torch.softmax, scores, -1, out=scores))
        calls.append(partial(torch.bmm, scores, values, out=seen_))
        calls.append(partial(x.addmm_, rows, out))


@torch.inference_mode()
def best(decoder: Decoder, batch: int, prompt: int, now: Callable[[], float]) -> str:
    """The form of attention that decodes `batch` rows behind `prompt` tokens fastest: the least time of each,
    tried in turns."""
    steps, turns = (8, 3) if batch >= 256 else (16, 8)
    uniforms = torch.full((steps, batch, 1), 0.5)
    loops = {form: Loop(decoder, batch, prompt + steps, form) for form in FORMS}
    found = dict.fromkeys(FORMS, float("inf"))
    for loop in loops.values():
        loop.ready(prompt, steps)
    for _ in range(turns):
        for form, loop in loops.items():
            began = now()
            loop.decode(prompt, steps, uniforms)
            found[form] = min(found[form], now() - began)
    return min(found, key=lambda form: found[form])
