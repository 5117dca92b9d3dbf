"""What every trainer must do, as checks over a `make` callable.

Role: the conformance suite of `trainer.base.Trainer`. Neighbours: `tests/contract` runs it over our
trainer, a plug-in's tests over theirs. Invariant: only the seam is used, so nothing is known of model or
optimiser.

Use: `@pytest.mark.parametrize("check", CHECKS)`, then `check(make)`; each `make()` gives the same fresh
trainer, of a model with at least 32 token ids and 64 tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from rollwright.errors import NoSignal, SchemaError
from rollwright.testing.records import VERSION, make_batch, make_row, make_sample
from rollwright.trainer.base import Trainer
from rollwright.types import Batch, Row, Sample

Make = Callable[[], Trainer]

Weights = dict[str, np.ndarray]


def held(trainer: Trainer) -> Weights:
    """A copy of the weights."""
    return {name: np.asarray(tensor).copy() for name, tensor in trainer.weights().items()}


def same(one: Weights, other: Weights) -> bool:
    """Whether two copies agree bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def on_policy(trainer: Trainer, row: Row) -> Row:
    """`row` with the logprobs that the trainer itself gives its sampled tokens."""
    logprobs = np.concatenate([np.zeros(1, np.float32), trainer.probe(row.tokens).logprobs])
    return replace(row, logprobs=np.where(row.sampled, logprobs, np.float32(0)))


def batch(trainer: Trainer, advantages: Sequence[float] = (1.0, -1.0, 0.5), seed: int = 0) -> Batch:
    """On-policy samples of unlike length with these advantages."""
    patterns = ("PPSSTSS", "PPPPSSS", "PPSSSTTTSSSS")
    rows = [make_row(patterns[i % 3], seed=seed + i) for i in range(len(advantages))]
    return make_batch(
        [
            make_sample(on_policy(trainer, row), advantage, rollout=f"g0/{i}")
            for i, (row, advantage) in enumerate(zip(rows, advantages, strict=True))
        ]
    )


def logprob(trainer: Trainer, row: Row) -> float:
    """Sum over the sampled tokens of `row` under the weights now."""
    return float(trainer.probe(row.tokens).logprobs[row.sampled[1:]].sum())


def check_step_follows_the_advantage(make: Make) -> None:
    """An encouraged row becomes likelier, a discouraged one less likely."""
    for advantage in (1.0, -1.0):
        trainer = make()
        given = batch(trainer, (advantage,))
        before = logprob(trainer, given.samples[0].row)
        trainer.step(given)
        assert (logprob(trainer, given.samples[0].row) - before) * advantage > 0


def check_only_weighted_tokens_count(make: Make) -> None:
    """What stands on tokens without weight, be it an infinite logprob or a huge advantage, changes
    nothing."""
    trainer, twin = make(), make()
    given = batch(trainer)
    masked = []
    for sample in given.samples:
        off = ~sample.row.sampled
        row = replace(sample.row, logprobs=np.where(off, np.float32(-np.inf), sample.row.logprobs))
        masked.append(replace(sample, row=row, advantages=np.where(off, np.float32(1e30), sample.advantages)))
    excluded = replace(make_sample(make_row("PPSSSS", seed=9), 100.0, weight=0.0), rollout="g9/0")
    trainer.step(given)
    twin.step(make_batch([*masked, excluded]))
    assert same(held(trainer), held(twin))


def check_unsampled_tokens_get_no_gradient(make: Make) -> None:
    """A weight that an algorithm put on a token nobody sampled is as good as none."""
    trainer, twin = make(), make()
    given = batch(trainer, (1.0, -1.0))
    everywhere = [
        replace(
            sample,
            weights=np.ones_like(sample.weights),
            advantages=np.where(sample.row.sampled, sample.advantages, np.float32(5)),
        )
        for sample in given.samples
    ]
    trainer.step(given)
    twin.step(make_batch(everywhere))
    assert same(held(trainer), held(twin))


def check_no_signal(make: Make) -> None:
    """A batch without advantage or weight is an error of its own, and changes nothing."""
    trainer = make()
    before = trainer.state()
    nothing: list[list[Sample]] = [[], [make_sample(advantage=0.0)], [make_sample(weight=0.0)]]
    for samples in nothing:
        try:
            trainer.step(make_batch(samples))
        except NoSignal:
            assert trainer.state() == before
        else:
            raise AssertionError(f"expected NoSignal for {samples}")


def check_metrics(make: Make) -> None:
    """What is reported is finite; on-policy there is no gap, and without fresh tokens none is reported."""
    trainer = make()
    given = batch(trainer)
    metrics = trainer.step(given).metrics
    assert {"loss", "entropy", "grad_norm", "clip_share", "ratio_max", "kl_old", "tokens"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["tokens"] == sum(int(sample.row.sampled.sum()) for sample in given.samples)
    assert metrics["logprob_gap"] <= 1e-5
    assert metrics["clip_share"] == 0
    assert abs(metrics["ratio_max"] - 1) <= 1e-5
    later = trainer.step(replace(given, version=VERSION.next())).metrics
    assert "logprob_gap" not in later


def check_supervise_learns(make: Make) -> None:
    """Demonstrated tokens become likelier."""
    trainer = make()
    rows = [make_row("PPSSSS", seed=1), make_row("PPPPSSTTSS", seed=2)]
    before = [logprob(trainer, row) for row in rows]
    losses = [trainer.supervise(rows).metrics["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(logprob(trainer, row) > old for row, old in zip(rows, before, strict=True))


def check_resume_is_exact(make: Make) -> None:
    """After `restore`, every following update and report is the one that would have come, bit for bit."""
    trainer, resumed = make(), make()
    trainer.supervise([make_row("PPSSSS", seed=1)])
    trainer.step(batch(trainer))
    state = trainer.state()
    resumed.step(batch(resumed, (-3.0, 3.0), seed=50))  # a past of its own, to be forgotten
    resumed.restore(state)
    assert resumed.state() == state
    for seed in (10, 20):
        given = batch(trainer, seed=seed)
        one, other = trainer.step(given).metrics, resumed.step(given).metrics
        assert {**one, "seconds": 0.0} == {**other, "seconds": 0.0}
    for each in (trainer, resumed):
        each.supervise([make_row("PPSSSS", seed=3)])
    assert resumed.state() == trainer.state() != state


def check_foreign_state_is_refused(make: Make) -> None:
    """Anything but a whole state is a `SchemaError` and changes nothing."""
    trainer = make()
    trainer.step(batch(trainer))
    state = trainer.state()
    middle = len(state) // 2
    flipped = state[:middle] + bytes([state[middle] ^ 1]) + state[middle + 1 :]
    for data in (b"", b"{}", state[:-1], state[:20], state + b"x", flipped, b"\xff" * 64):
        try:
            trainer.restore(data)
        except SchemaError:
            assert trainer.state() == state
        else:
            raise AssertionError(f"expected SchemaError for {len(data)} bytes")


def check_weights_are_live(make: Make) -> None:
    """`weights` shows the weights as they change; a probe shows the model as it is."""
    trainer = make()
    live, before = trainer.weights(), held(trainer)
    row = make_row("PPSSTTSS", seed=4)
    probe = trainer.probe(row.tokens)
    assert probe.logprobs.shape == (len(row.tokens) - 1,)
    assert probe.logprobs.dtype == np.float32
    assert (probe.logprobs <= 0).all()
    assert np.array_equal(probe.logprobs, trainer.probe(row.tokens).logprobs)
    trainer.step(batch(trainer))
    assert not same(before, held(trainer))
    assert all(np.array_equal(np.asarray(live[name]), now) for name, now in held(trainer).items())
    assert not np.array_equal(probe.logprobs, trainer.probe(row.tokens).logprobs)


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_step_follows_the_advantage,
    check_only_weighted_tokens_count,
    check_unsampled_tokens_get_no_gradient,
    check_no_signal,
    check_metrics,
    check_supervise_learns,
    check_resume_is_exact,
    check_foreign_state_is_refused,
    check_weights_are_live,
)
