"""Who made a record, and with which policy: identity, policy versions and their lineage, published weights.

Role: invariants 5 and 11. Neighbours: everything that is stored carries an `Identity`. Invariant: lag is
never negative.
"""

from __future__ import annotations

from rollwright.errors import LineageError
from rollwright.types.record import ArrayRecord, Floats, Ints, Record


class PolicyVersion(Record, frozen=True, kw_only=True, order=True):
    """One state of one policy: (run, policy, incarnation, step). A resume or rollback opens a new
    incarnation."""

    run: str
    policy: str = "policy"
    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.step}"

    def next(self) -> PolicyVersion:
        """The version one optimiser step later."""
        return PolicyVersion(
            run=self.run, policy=self.policy, incarnation=self.incarnation, step=self.step + 1
        )


class Lineage(Record, frozen=True, kw_only=True):
    """Which versions are ancestors of the current one. `forks[i]` is the step at which incarnation `i`
    began."""

    run: str
    policy: str = "policy"
    forks: tuple[int, ...] = (0,)

    def fork(self, step: int) -> Lineage:
        """Open a new incarnation at `step` (a resume or a rollback)."""
        return Lineage(run=self.run, policy=self.policy, forks=(*self.forks, step))

    def version(self, step: int) -> PolicyVersion:
        """The version at `step` of the newest incarnation."""
        return PolicyVersion(run=self.run, policy=self.policy, incarnation=len(self.forks) - 1, step=step)

    def lag(self, consuming: PolicyVersion, generating: PolicyVersion) -> int | None:
        """Optimiser steps between the two, ≥ 0; None where `generating` lies on an abandoned branch.

        Raises:
            LineageError: the versions belong to another run or policy.
        """
        for version in (consuming, generating):
            if (version.run, version.policy) != (self.run, self.policy):
                raise LineageError(f"{version} of run {version.run} is not of run {self.run}/{self.policy}")
        newer = range(generating.incarnation + 1, consuming.incarnation + 1)
        if generating.incarnation > consuming.incarnation or consuming.incarnation >= len(self.forks):
            return None
        if any(generating.step > self.forks[i] for i in newer) or generating.step > consuming.step:
            return None
        return consuming.step - generating.step


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens `[start, end)` of a row or completion came from `version`."""

    version: PolicyVersion
    start: int
    end: int


class Identity(Record, frozen=True, kw_only=True):
    """Who and what a record belongs to; quotas, credit, trace and rollback hang on it."""

    run: str
    job: str = "train"
    tenant: str = "default"
    policy: str = "policy"
    agent: str = "agent"
    role: str = "solver"
    task: str = ""
    group: str = ""
    rollout: str = ""
    attempt: int = 0
    trace: str = ""
    """W3C trace id: 32 hex digits, made where the rollout starts."""


class Probe(ArrayRecord, frozen=True, kw_only=True):
    """Tokens int32[T] and the trainer's logprobs float32[T-1] of them: what an engine must reproduce after
    a push."""

    tokens: Ints
    logprobs: Floats


class WeightsRef(ArrayRecord, frozen=True, kw_only=True):
    """Published weights: their version, the digest of their bytes, and a probe."""

    version: PolicyVersion
    digest: str
    probe: Probe | None = None
