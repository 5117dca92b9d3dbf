"""The trainer in this process: AdamW on the clipped surrogate, in micro-batches.

Role: implements `base.Trainer`. Neighbours: `packing` (rows → tensors), `loss` (formulas), `checkpoint`
(state → bytes), the decoder it shares with the embedded engine. Invariants: those of `base`; resuming from
`state()` continues bit for bit; a failed update leaves weights and optimiser as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollwright.clock import Clock, SystemClock
from rollwright.errors import NoSignal, SchemaError
from rollwright.model.attention import causal, positions
from rollwright.model.decoder import Decoder
from rollwright.trainer import checkpoint
from rollwright.trainer.base import StepReport
from rollwright.trainer.config import TrainerConfig
from rollwright.trainer.loss import Tally, clipped_surrogate, token_logprobs, weighted_mean
from rollwright.trainer.packing import Example, MicroBatch, pack, padding_share
from rollwright.types import Batch, Ints, Probe, Row

Loss = Callable[[MicroBatch, Tensor, Tally], Tensor]
"""(micro-batch, logprobs float32[K] of its targets, tally) → losses float32[K]."""

_ADAM = ("step", "exp_avg", "exp_avg_sq")


class _Optimiser:
    """AdamW and the count of its updates."""

    def __init__(self, decoder: Decoder, lr: float, config: TrainerConfig) -> None:
        self.names = dict(decoder.named_parameters())
        self.lr, self.clip, self.updates = lr, config.grad_clip, 0
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.names.values() if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.names.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=True)

    def update(self, rate: float) -> float:
        """One update at `rate` times the learning rate from the gradients held; returns their norm before
        clipping.

        Raises:
            FloatingPointError: the gradient isn't finite; nothing was changed.
        """
        norm = float(nn.utils.clip_grad_norm_(self.names.values(), self.clip))
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of update {self.updates + 1} has norm {norm}: the weights were left "
                "as they are; go back to an earlier checkpoint, with a lower learning rate"
            )
        self.updates += 1
        for group in self.adam.param_groups:
            group["lr"] = self.lr * rate
        self.adam.step()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Adam's state by parameter and kind; empty before the first update."""
        state = self.adam.state
        held = {name: state[p] for name, p in self.names.items() if p in state}
        return {f"{kind}/{name}": moments[kind] for name, moments in held.items() for kind in _ADAM}

    def restore(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Back to what `tensors` gave after `updates` updates."""
        self.updates = updates
        self.adam.state.clear()
        if tensors:
            for name, parameter in self.names.items():
                self.adam.state[parameter] = {kind: tensors[f"{kind}/{name}"].clone() for kind in _ADAM}

    def forms(self) -> dict[str, str]:
        """Types and shapes of what `tensors` gives after an update."""
        return {
            f"{kind}/{name}": _form(p.new_zeros(()) if kind == "step" else p)
            for name, p in self.names.items()
            for kind in _ADAM
        }


class TorchTrainer:
    """Owns `decoder` and two optimisers: one of policy steps, one of the warm start.

    Reports hold, besides what `StepReport` names: lr, forward_tokens (tokens computed, prompts included)
    and logprob_gap_mean. `tokens` counts trained tokens.
    """

    def __init__(self, decoder: Decoder, config: TrainerConfig, *, clock: Clock | None = None) -> None:
        self.decoder, self.config = decoder, config
        self._clock = clock or SystemClock()
        self._rng = np.random.default_rng(config.seed)
        self._policy = _Optimiser(decoder, config.lr, config)
        self._supervised = _Optimiser(decoder, config.sft_lr, config)

    def step(self, batch: Batch, rate: float = 1.0) -> StepReport:
        """See `Trainer.step`.

        Raises:
            NoSignal: no token has both an advantage and a weight.
            ValueError: a row breaks the contract; the text names its rollout. Nothing was changed.
            FloatingPointError: the gradient isn't finite; that update was not made.
        """
        examples = [Example.of_sample(sample, batch.version) for sample in batch.samples]
        self._check(examples)
        if not any(np.any(e.advantages[e.trained]) for e in examples):
            raise NoSignal(
                f"none of the {len(examples)} samples of the batch for {batch.version} has a token "
                "with advantage and weight: every group had equal rewards or no scorable member; "
                "skip the batch or draw other tasks"
            )
        parts = [examples]
        if self.config.minibatches > 1:
            order = self._rng.permutation(len(examples))
            split = np.array_split(order, min(self.config.minibatches, len(examples)))
            parts = [[examples[i] for i in part] for part in split]
        return self._train(self._policy, parts, self._surrogate, self.config.temperature, rate)

    def supervise(self, rows: list[Row], rate: float = 1.0) -> StepReport:
        """See `Trainer.supervise`. Raises as `step`."""
        examples = [Example.of_row(row, f"demonstration {i}") for i, row in enumerate(rows)]
        self._check(examples)
        if not any(e.trained.size for e in examples):
            raise NoSignal(f"none of the {len(rows)} demonstration rows has a token marked as sampled")
        return self._train(self._supervised, [examples], _cross_entropy, 1.0, rate)

    @property
    def supervised(self) -> int:
        """See `Trainer.supervised`."""
        return self._supervised.updates

    def weights(self) -> Mapping[str, Tensor]:
        """See `Trainer.weights`."""
        return self.decoder.state_dict()

    @torch.inference_mode()
    def probe(self, tokens: Ints) -> Probe:
        """See `Trainer.probe`; at temperature 1."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        lengths = (len(ids) - 1,)
        hidden = self.decoder(ids[:-1], positions(lengths), causal(lengths, self.decoder.shape))
        logprobs, _ = token_logprobs(self.decoder.logits(hidden), ids[1:], 1.0)
        return Probe(tokens=tokens, logprobs=logprobs.numpy())

    def state(self) -> bytes:
        """See `Trainer.state`."""
        tensors = {f"model/{name}": tensor for name, tensor in self.weights().items()}
        for name, optimiser in self._optimisers.items():
            tensors |= {f"{name}/{key}": tensor for key, tensor in optimiser.tensors().items()}
        updates = {name: optimiser.updates for name, optimiser in self._optimisers.items()}
        return checkpoint.pack(tensors, {"updates": updates, "rng": self._rng.bit_generator.state})

    def restore(self, data: bytes) -> None:
        """See `Trainer.restore`; after an error nothing was changed."""
        tensors, counters = checkpoint.unpack(data)
        rng = np.random.default_rng()
        try:
            updates = {name: int(counters["updates"][name]) for name in self._optimisers}
            rng.bit_generator.state = counters["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"trainer state with other counters: {error!r}") from error
        expected = {f"model/{name}": _form(tensor) for name, tensor in self.weights().items()}
        for name, optimiser in self._optimisers.items():
            if updates[name]:
                expected |= {f"{name}/{key}": form for key, form in optimiser.forms().items()}
        found = {name: _form(tensor) for name, tensor in tensors.items()}
        if found != expected:
            raise SchemaError(_difference(expected, found))
        self._rng = rng
        self.decoder.load_state_dict(_part(tensors, "model"))
        for name, optimiser in self._optimisers.items():
            optimiser.restore(_part(tensors, name), updates[name])

    @property
    def _optimisers(self) -> dict[str, _Optimiser]:
        return {"policy": self._policy, "supervised": self._supervised}

    def _check(self, examples: Sequence[Example]) -> None:
        for example in examples:
            example.check(self.decoder.config.context, self.decoder.vocab)

    def _train(
        self,
        optimiser: _Optimiser,
        parts: Sequence[Sequence[Example]],
        loss: Loss,
        temperature: float,
        rate: float,
    ) -> StepReport:
        """One update for each part. Each micro-batch's graph is freed before the next is made."""
        began = self._clock.now()
        tally, micros, norm = Tally(), list[MicroBatch](), 0.0
        for part in parts:
            packed = pack(part, self.config.microbatch_tokens)
            if not packed:
                continue
            total = float(sum(float(micro.weights.sum()) for micro in packed))
            self.decoder.zero_grad(set_to_none=True)
            for micro in packed:
                logprobs, entropy = self._forward(micro, temperature)
                mean = weighted_mean(loss(micro, logprobs, tally), micro.weights, total)
                torch.autograd.backward(mean)
                tally.add(mean, entropy)
            norm = max(norm, optimiser.update(rate))
            tally.updates += 1
            micros += packed
        self.decoder.zero_grad(set_to_none=True)
        metrics = tally.metrics() | {
            "grad_norm": norm,
            "lr": float(optimiser.adam.param_groups[0]["lr"]),
            "padding_share": padding_share(micros),
            "forward_tokens": float(sum(sum(micro.lengths) for micro in micros)),
            "seconds": self._clock.now() - began,
        }
        return StepReport(metrics=metrics)

    def _forward(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies float32[K] of the micro-batch's targets."""
        place = positions(micro.lengths)
        hidden = self.decoder(micro.ids, place, causal(micro.lengths, self.decoder.shape), keep=micro.keep)
        return token_logprobs(self.decoder.logits(hidden), micro.targets, temperature)

    def _surrogate(self, micro: MicroBatch, logprobs: Tensor, tally: Tally) -> Tensor:
        losses, clipped = clipped_surrogate(
            logprobs,
            micro.behaviour,
            micro.advantages,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            cap=self.config.importance_cap,
        )
        tally.compare(logprobs, micro.behaviour, clipped, micro.fresh)
        return losses


def _cross_entropy(micro: MicroBatch, logprobs: Tensor, tally: Tally) -> Tensor:
    return -logprobs


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors below `part/`."""
    return {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}


def _difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """What to say of a state that doesn't fit: its first difference."""
    names = sorted(expected.keys() | found.keys())
    name = next(name for name in names if expected.get(name) != found.get(name))
    return (
        f"trainer state of another model: '{name}' is {found.get(name, 'absent')}, this decoder has "
        f"{expected.get(name, 'none')}; give the [model] configuration it was trained with"
    )
