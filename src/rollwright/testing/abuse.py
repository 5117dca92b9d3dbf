"""The abuse suite: what agent code may try, over any backend, with *declared = observed* as its verdict.

Role: runs `PROBES` and compares. Neighbours: `testing.probes` has the attempts; our tests and
`benchmarks/sandbox_abuse.py` run them over the backends of a machine, a plug-in's tests can too.
Invariants: a guarantee that is declared `enforced` stops every attempt at it; one declared `best_effort`
stops some; one declared `absent` lets one through. What is claimed and not kept is *weaker* than declared;
what is kept and not claimed is *stronger*; both fail.

    provider = NativeSandbox().build(folder)
    await provider.start()
    await assert_declared(provider)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from rollwright.errors import RollwrightError
from rollwright.sandbox.base import Guarantee, GuaranteeName, Guarantees, SandboxProvider
from rollwright.testing.probes import exchange, files, floods, kernel, network, processes, resources
from rollwright.testing.probes.base import PROBES, Against, Observation, Probe

__all__ = ["PROBES", "Against", "Finding", "Mismatch", "Observation", "Probe", "assert_declared", "observe"]

MODULES = (files, network, processes, resources, kernel, exchange, floods)
"""Where the probes come from; importing them filled the list."""
_PROBE_SECONDS = 60.0
"""A probe that takes so long hangs, which is what it was to show."""


@dataclass(frozen=True)
class Finding:
    """One probe's observation."""

    probe: str
    observation: Observation


@dataclass(frozen=True)
class Mismatch:
    """Where declared and observed part."""

    guarantee: Against
    weaker: bool
    """Observed weaker than declared; else stronger."""
    text: str


async def observe(provider: SandboxProvider, probes: Sequence[Probe] = PROBES) -> list[Finding]:
    """Run each probe on a started provider, one after another. One that ends in an error of ours, hangs or
    loses its sandbox is an attempt that was not stopped."""
    found = []
    for probe in probes:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                observation = await probe(provider)
        except (RollwrightError, AssertionError, OSError, TimeoutError) as error:
            observation = Observation("always", False, f"{type(error).__name__}: {error}")
        found.append(Finding(probe.__name__, observation))
    return found


def judge(findings: Sequence[Finding], declared: Guarantees) -> list[Mismatch]:
    """Where what was observed is not what is declared."""
    found = [
        Mismatch("always", True, f"{each.probe} got through: {each.observation.detail}")
        for each in findings
        if each.observation.guarantee == "always" and not each.observation.stopped
    ]
    for name in get_args(GuaranteeName):
        tried = [each for each in findings if each.observation.guarantee == name]
        through = [each for each in tried if not each.observation.stopped]
        level = getattr(declared, name)
        if level is Guarantee.ENFORCED:
            texts = (f"{each.probe} got through: {each.observation.detail}" for each in through)
            found += [Mismatch(name, True, f"{name} is declared enforced, but {text}") for text in texts]
        elif level is Guarantee.BEST_EFFORT and tried and len(through) == len(tried):
            found.append(Mismatch(name, True, f"{name} is declared best_effort, but stops nothing"))
        elif level is Guarantee.ABSENT and tried and not through:
            found.append(Mismatch(name, False, f"{name} is declared absent, but every attempt was stopped"))
    return found


async def assert_declared(provider: SandboxProvider, probes: Sequence[Probe] = PROBES) -> None:
    """Raises `AssertionError` with every mismatch."""
    mismatches = judge(await observe(provider, probes), provider.guarantees)
    assert not mismatches, "\n".join(each.text for each in mismatches)
