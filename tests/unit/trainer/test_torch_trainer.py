"""The trainer's own promises: the gradient it really applies, minibatches, warm-up, faults."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from pydantic import ValidationError

from rollwright.errors import NoSignal, SchemaError
from rollwright.model.attention import causal, positions
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.records import make_batch, make_row, make_sample
from rollwright.testing.trainers import batch, held, on_policy, same
from rollwright.trainer.config import TrainerConfig
from rollwright.trainer.torch_trainer import TorchTrainer
from rollwright.types import Batch, Sample

MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, context=64)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(seed: int = 0, **config: object) -> TorchTrainer:
    decoder = Decoder(MODEL, vocab=32)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return TorchTrainer(decoder, TrainerConfig.model_validate(config))


def varied(trainer: TorchTrainer) -> Batch:
    """Rows of many lengths, weights and advantages, some off-policy beyond clip and cap."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(9):
        row = on_policy(trainer, make_row("PP" + "SSTSSI"[: 1 + i % 6] * (1 + i % 3), seed=i))
        shift = rng.uniform(-1.5, 1.5, len(row.tokens)).astype(np.float32) * row.sampled * (i % 2)
        sample = make_sample(replace(row, logprobs=row.logprobs + shift), rollout=f"g0/{i}")
        weights = sample.weights * rng.uniform(0.1, 2, len(shift)).astype(np.float32)
        advantages = rng.normal(size=len(shift)).astype(np.float32)
        samples.append(replace(sample, weights=weights, advantages=advantages))
    return make_batch(samples)


def naive_gradient(
    trainer: TorchTrainer, samples: tuple[Sample, ...]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient row by row and token by token, in float64, without packing and without `keep`."""
    decoder = Decoder(MODEL, vocab=32).double()
    decoder.load_state_dict(trainer.decoder.state_dict())
    config, total, loss = trainer.config, 0.0, torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(sample.row.tokens.tolist())
        hidden = decoder(ids, positions([len(ids)]), causal([len(ids)]))
        scores = torch.log_softmax(decoder.logits(hidden) / config.temperature, -1)
        for t in range(1, len(ids)):
            weight, advantage = float(sample.weights[t]), float(sample.advantages[t])
            if not weight:
                continue
            total += weight
            new = scores[t - 1, ids[t]]
            ratio = torch.exp(new - float(sample.row.logprobs[t]))
            if float(ratio.detach()) > config.importance_cap:
                ratio = config.importance_cap * torch.exp(new - new.detach())
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = loss - weight * torch.minimum(advantage * ratio, advantage * clipped)
    loss = loss / total
    names = dict(decoder.named_parameters())
    found = torch.autograd.grad(loss, list(names.values()))
    return float(loss.detach()), dict(zip(names, found, strict=True))


def applied_gradient(trainer: TorchTrainer, given: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and the gradient that reached Adam in its first update: its first moment is (1 − β₁)·g."""
    report = trainer.step(given)
    moments = trainer._policy.tensors()
    names = trainer._policy.names
    return report.metrics["loss"], {name: moments[f"exp_avg/{name}"] / 0.1 for name in names}


@pytest.mark.parametrize("tokens", [1, 16, 40, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_are_the_naive_ones_however_rows_are_packed(
    tokens: int, temperature: float
) -> None:
    trainer = make(microbatch_tokens=tokens, grad_clip=1e9, temperature=temperature)
    given = varied(trainer)
    expected_loss, expected = naive_gradient(trainer, given.samples)
    loss, found = applied_gradient(trainer, given)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name].float(), atol=2e-6), name


def test_the_order_of_samples_is_nothing() -> None:
    one, other = make(grad_clip=1e9), make(grad_clip=1e9)
    given = varied(one)
    loss, gradient = applied_gradient(one, given)
    turned = replace(given, samples=given.samples[::-1])
    loss_turned, gradient_turned = applied_gradient(other, turned)
    assert loss == pytest.approx(loss_turned, abs=1e-6)
    assert all(torch.allclose(gradient[n], gradient_turned[n], atol=1e-6) for n in gradient)


def test_splitting_a_row_at_a_turn_keeps_the_gradient() -> None:
    """Two rows that train one half each, with the same context, are worth the one that trains both."""
    whole, halves = make(grad_clip=1e9), make(grad_clip=1e9)
    row = on_policy(whole, make_row("PPSSTTSS"))
    sample = make_sample(row)
    early = np.arange(8) < 4
    cut = [
        replace(sample, weights=np.where(early, sample.weights, np.float32(0))),
        replace(sample, weights=np.where(early, np.float32(0), sample.weights)),
    ]
    _, expected = applied_gradient(whole, make_batch([sample]))
    _, found = applied_gradient(halves, make_batch(cut))
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in found)


def test_keep_gives_the_rows_of_the_whole() -> None:
    decoder = make().decoder
    ids, lengths = torch.arange(11), [4, 7]
    whole = decoder(ids, positions(lengths), causal(lengths))
    kept = decoder(ids, positions(lengths), causal(lengths), keep=torch.tensor([0, 3, 9]))
    assert torch.allclose(kept, whole[[0, 3, 9]], atol=1e-6)


def test_a_probe_equals_what_the_step_computes() -> None:
    """Off the packed path and on it, logprobs agree far below 1e-5."""
    trainer = make(microbatch_tokens=30)
    metrics = trainer.step(batch(trainer, (1.0, -1.0, 2.0, 0.5, -3.0))).metrics
    assert metrics["logprob_gap"] <= 2e-6


def test_minibatches_are_updates_of_their_own_and_train_each_sample_once() -> None:
    trainer = make(minibatches=3)
    given = batch(trainer, (1.0, -1.0, 0.5, 2.0, -0.5))
    metrics = trainer.step(given).metrics
    assert metrics["tokens"] == sum(s.row.sampled.sum() for s in given.samples)
    assert trainer._policy.updates == 3
    more = make(minibatches=9)
    more.step(batch(more, (1.0, -1.0)))
    assert more._policy.updates == 2


def test_minibatches_resume_exactly() -> None:
    one, other = make(minibatches=2), make(minibatches=2)
    one.step(batch(one))
    other.restore(one.state())
    given = batch(one, (1.0, -1.0, 0.5, 2.0))
    one.step(given)
    other.step(given)
    assert one.state() == other.state()


def test_the_rate_scales_each_kind_of_update_on_its_own_learning_rate() -> None:
    trainer = make(lr=1e-3, sft_lr=2e-3)
    supervised = [trainer.supervise([make_row("PPSS")], rate).metrics["lr"] for rate in (0.25, 1.0)]
    policy = [trainer.step(batch(trainer), rate).metrics["lr"] for rate in (0.5, 0.1)]
    assert supervised == pytest.approx([0.5e-3, 2e-3])
    assert policy == pytest.approx([0.5e-3, 0.1e-3])


def test_a_bad_row_or_an_infinite_gradient_changes_nothing() -> None:
    trainer = make()
    trainer.step(batch(trainer))
    before = trainer.state()
    with pytest.raises(ValueError, match=r"rollout g0/0.*predicts"):
        trainer.step(make_batch([make_sample(make_row("SPS"))]))
    with pytest.raises(NoSignal, match="equal rewards"):
        trainer.step(make_batch([make_sample(advantage=0.0)]))
    with pytest.raises(NoSignal, match="demonstration"):
        trainer.supervise([make_row("PPTT")])
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        trainer.step(make_batch([make_sample(advantage=3e38), make_sample(advantage=-3e38)]))
    assert trainer.state() == before
    trainer.step(batch(trainer))  # and it goes on


def test_a_state_of_another_shape_is_refused_and_says_what_differs() -> None:
    trainer = make()
    before = held(trainer)
    wider = TorchTrainer(Decoder(ModelConfig(dim=32, layers=2), vocab=32), TrainerConfig())
    with pytest.raises(SchemaError, match=r"model/blocks.0.*torch.float32\[.*\[model\] configuration"):
        trainer.restore(wider.state())
    assert same(held(trainer), before)


def test_restoring_a_fresh_state_forgets_the_moments() -> None:
    trainer, fresh = make(), make()
    start = trainer.state()
    trainer.step(batch(trainer))
    trainer.supervise([make_row("PPSS")])
    trainer.restore(start)
    assert trainer.state() == start
    given = batch(fresh)
    assert trainer.step(given).metrics["loss"] == fresh.step(given).metrics["loss"]
    assert trainer.state() == fresh.state()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("importance_cap", 1.1),
        ("betas", (0.9, 1.0)),
        ("lr", 0.0),
        ("minibatches", 0),
        ("clip_low", 1.0),
        ("learning_rate", 1e-3),
    ],
)
def test_contradictory_configuration_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        TrainerConfig.model_validate({key: value})
