"""Trainer and algorithm together really learn, on toys small enough to know the answer; a control doesn't."""

import numpy as np
import pytest
import torch

from rollwright.algo.config import GrpoConfig, RlooConfig
from rollwright.model.attention import causal, positions
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.records import make_batch, make_group, make_row
from rollwright.trainer.config import TrainerConfig
from rollwright.trainer.torch_trainer import TorchTrainer
from rollwright.types import PolicyVersion, Row

VOCAB, ARMS = 16, 6


def make(**config: object) -> TorchTrainer:
    torch.set_num_threads(1)
    decoder = Decoder(ModelConfig(dim=32, layers=2, heads=2, kv_heads=2, ffn=64, context=32), VOCAB)
    decoder.initialise(torch.Generator().manual_seed(0))
    return TorchTrainer(decoder, TrainerConfig.model_validate(config))


def test_supervision_learns_to_copy_what_it_never_saw() -> None:
    trainer, rng = make(sft_lr=6e-3), np.random.default_rng(0)

    def row() -> Row:
        word = rng.integers(1, VOCAB, 3)
        return make_row("PPPPSSS", tokens=[*word, 0, *word])

    def loss() -> float:
        logprobs = [
            trainer.probe(r.tokens).logprobs[r.sampled[1:]].mean() for r in [row() for _ in range(32)]
        ]
        return -float(np.mean(logprobs))

    assert loss() > 2
    for _ in range(500):
        if trainer.supervise([row() for _ in range(32)]).metrics["loss"] < 0.2:
            break
    assert loss() < 0.4


class Bandit:
    """Two sampled tokens after a prompt; 1 is paid when the first is the arm that the prompt names."""

    def __init__(self, trainer: TorchTrainer, seed: int = 0) -> None:
        self.trainer, self.generator = trainer, torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)

    @torch.no_grad()
    def rollouts(self, arms: list[int], version: PolicyVersion) -> list[tuple[Row, float]]:
        """One for each arm, sampled side by side."""
        decoder, n = self.trainer.decoder, len(arms)
        ids = torch.tensor([[0, arm] for arm in arms])
        logprobs = torch.zeros(n, 2)
        for width in (2, 3):
            lengths = [width] * n
            hidden = decoder(ids.reshape(-1), positions(lengths), causal(lengths)).view(n, width, -1)
            scores = torch.log_softmax(decoder.logits(hidden[:, -1]), -1)
            token = torch.multinomial(scores.exp(), 1, generator=self.generator)
            ids, logprobs = torch.cat((ids, token), 1), torch.cat((logprobs, scores.gather(1, token)), 1)
        return [
            (make_row("PPSS", tokens=row, logprobs=lp, version=version), float(row[2] == arm + 8))
            for row, lp, arm in zip(ids.tolist(), logprobs.tolist(), arms, strict=True)
        ]

    def success(self) -> float:
        arms = [1 + i % ARMS for i in range(300)]
        return float(np.mean([reward for _, reward in self.rollouts(arms, PolicyVersion(run="run"))]))

    def learn(self, config: GrpoConfig | RlooConfig, *, rounds: int, updates: int, shuffle: bool) -> None:
        """Each round samples once and trains `updates` times on it: beyond 1, with stale samples."""
        version = PolicyVersion(run="run")
        for _ in range(rounds):
            samples = []
            for arm in range(1, ARMS + 1):
                made = self.rollouts([arm] * 16, version)
                rewards = np.array([reward for _, reward in made])
                if shuffle:
                    self.rng.shuffle(rewards)
                group = make_group(rewards.tolist(), rows=[[row] for row, _ in made], id=f"g{arm}")
                samples += config.build().samples(group)
            for _ in range(updates if samples else 0):
                self.trainer.step(make_batch(samples, version=version))
                version = version.next()


@pytest.mark.parametrize(
    ("config", "updates"),
    [(GrpoConfig(), 1), (GrpoConfig(scale="std"), 3), (RlooConfig(), 1)],
    ids=["grpo", "stale-grpo", "rloo"],
)
def test_reward_is_learnt(config: GrpoConfig | RlooConfig, updates: int) -> None:
    bandit = Bandit(make(lr=5e-3, weight_decay=0.0))
    assert bandit.success() < 0.2
    bandit.learn(config, rounds=60 // updates, updates=updates, shuffle=False)
    assert bandit.success() > 0.6  # one of six arms may be lost to the first lucky other


def test_shuffled_reward_teaches_nothing() -> None:
    bandit = Bandit(make(lr=5e-3, weight_decay=0.0))
    bandit.learn(GrpoConfig(), rounds=30, updates=1, shuffle=True)
    assert bandit.success() < 0.3
