"""Builders of valid records, so that a test says only what it is about.

Role: rows, rollouts, groups, samples and batches out of a few words. Neighbours: everyone's tests. Invariant:
what is built keeps the contracts of `types`: spans cover exactly the sampled tokens, logprobs are 0
elsewhere, ids differ between rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rollwright.types import (
    Batch,
    Finish,
    Group,
    Identity,
    Outcome,
    PolicyVersion,
    Provenance,
    Rollout,
    Row,
    Sample,
    Score,
    Scored,
    Turn,
    VersionSpan,
)

VERSION = PolicyVersion(run="run")
"""Step 0 of incarnation 0: the version that made what these builders make."""

_MARKS = {
    "P": Provenance.PROMPT,
    "S": Provenance.SAMPLED,
    "T": Provenance.TOOL,
    "I": Provenance.INJECTED,
}


def make_row(
    pattern: str = "PPPSSTTSS",
    *,
    tokens: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    version: PolicyVersion = VERSION,
    vocab: int = 32,
    seed: int = 0,
) -> Row:
    """A row of one token for each letter of `pattern`: P(rompt), S(ampled), T(ool), I(njected).

    Ids and behaviour logprobs are drawn from `seed` unless given (`logprobs` of other letters are set to 0).
    """
    marks = np.array([_MARKS[letter] for letter in pattern], dtype=np.uint8)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, len(pattern)) if tokens is None else tokens
    drawn = rng.uniform(-3.0, -0.1, len(pattern)) if logprobs is None else logprobs
    return Row(
        tokens=np.array(ids, dtype=np.int32),
        provenance=marks,
        logprobs=np.where(marks == Provenance.SAMPLED, np.array(drawn), 0.0).astype(np.float32),
        spans=tuple(VersionSpan(version=version, start=a, end=b) for a, b in sampled_runs(marks)),
    )


def sampled_runs(provenance: Sequence[int] | np.ndarray) -> Iterator[tuple[int, int]]:
    """`[start, end)` of each unbroken run of sampled tokens."""
    sampled = np.concatenate(([False], np.equal(provenance, Provenance.SAMPLED), [False]))
    edges = np.flatnonzero(sampled[1:] != sampled[:-1]).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def make_rollout(
    rows: Sequence[Row] | None = None,
    *,
    rollout: str = "g0/0",
    group: str = "g0",
    task: str = "t0",
    outcome: Outcome = Outcome.ANSWERED,
    answer: str | None = None,
    error: str | None = None,
    attempt: int = 0,
    run: str = "run",
) -> Rollout:
    """A rollout over `rows` (one default row), with one turn for each run of sampled tokens."""
    held = (make_row(),) if rows is None else tuple(rows)
    turns = tuple(
        Turn(row=number, start=a, end=b, text=f"turn {a}", finish=Finish.STOP, prompt_tokens=a)
        for number, row in enumerate(held)
        for a, b in sampled_runs(row.provenance)
    )
    identity = Identity(
        run=run, task=task, group=group, rollout=rollout, attempt=attempt, trace="0" * 31 + "1"
    )
    return Rollout(identity=identity, rows=held, turns=turns, outcome=outcome, answer=answer, error=error)


def make_group(
    rewards: Sequence[float | None],
    *,
    outcomes: Sequence[Outcome] | None = None,
    rows: Sequence[Sequence[Row]] | None = None,
    id: str = "g0",
    task: str = "t0",
    attempt: int = 0,
    version: PolicyVersion = VERSION,
    pattern: str = "PPPSSTTSS",
) -> Group:
    """A group with one member for each reward; None is an unscorable member, NaN stays a (faulty) NaN value.

    `rows[i]` are member i's rows; by default one row of `pattern` with ids of its own. `outcomes[i]` is its
    outcome.
    """
    members = []
    for i, reward in enumerate(rewards):
        held = [make_row(pattern, version=version, seed=i)] if rows is None else rows[i]
        made = make_rollout(
            held,
            rollout=f"{id}/{i}" if attempt == 0 else f"{id}/{i}.{attempt}",
            group=id,
            task=task,
            attempt=attempt,
            run=version.run,
            outcome=Outcome.ANSWERED if outcomes is None else outcomes[i],
        )
        score = Score.unscorable("made so") if reward is None else Score(value=reward)
        members.append(Scored(rollout=made, score=score))
    return Group(id=id, task=task, members=tuple(members), attempt=attempt)


def make_sample(
    row: Row | None = None, advantage: float = 1.0, *, weight: float = 1.0, rollout: str = "g0/0"
) -> Sample:
    """`row` with the same advantage and weight on each sampled token, 0 elsewhere."""
    held = make_row() if row is None else row
    sampled = held.sampled.astype(np.float32)
    return Sample(
        rollout=rollout,
        group=rollout.partition("/")[0],
        row=held,
        advantages=np.float32(advantage) * sampled,
        weights=np.float32(weight) * sampled,
    )


def make_batch(samples: Sequence[Sample], *, version: PolicyVersion = VERSION) -> Batch:
    """`samples`, consumed at `version`."""
    return Batch(samples=tuple(samples), version=version)
