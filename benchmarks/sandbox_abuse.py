"""What agent code may try, over every sandbox backend of this machine: stopped or not, and as declared?

Prints a table probe × backend: `stopped`, `through`, and the guarantee that the attempt is aimed at with what
the backend declares of it. Cases: `BACKEND/through` (attempts that got through), `BACKEND/weaker` and
`BACKEND/stronger` (where observed is not as declared), `BACKEND/seconds`. Ends with 1 where a backend is
observed weaker than it declares.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends import BACKENDS, started
from harness import Cases, parser
from rich.console import Console
from rich.table import Table

from rollwright.clock import SystemClock
from rollwright.errors import SandboxUnavailable
from rollwright.sandbox.base import Guarantees
from rollwright.testing.abuse import PROBES, Finding, Mismatch, judge, observe


async def tried(
    cases: Cases, name: str, folder: Path
) -> tuple[list[Finding], list[Mismatch], Guarantees] | None:
    """What was observed of a backend, and where that is not what it declares; None where it isn't here."""
    clock = SystemClock()
    try:
        async with started(name, folder) as provider:
            began = clock.now()
            findings = await observe(provider)
            seconds, declared = clock.now() - began, provider.guarantees
    except SandboxUnavailable as error:
        print(f"{name}: not on this machine: {error}", file=sys.stderr)
        return None
    mismatches = judge(findings, declared)
    through = sum(not each.observation.stopped for each in findings)
    cases.add(f"{name}/through", through, len(findings), ratio=through, unit="attempts")
    for case, weaker in (("weaker", True), ("stronger", False)):
        cases.add(f"{name}/{case}", sum(each.weaker is weaker for each in mismatches), unit="mismatches")
    cases.add(f"{name}/seconds", seconds, unit="seconds")
    return findings, mismatches, declared


def table(found: Mapping[str, tuple[Sequence[Finding], Guarantees]]) -> Table:
    """A row for each probe, a column for each backend."""
    made = Table("against", "probe", *found)
    by_name = {
        name: {each.probe: each.observation for each in findings} for name, (findings, _) in found.items()
    }
    for probe in PROBES:
        cells, aimed = [], ""
        for name, (_, declared) in found.items():
            seen = by_name[name][probe.__name__]
            aimed = seen.guarantee
            said = "every backend" if aimed == "always" else getattr(declared, aimed).value
            cells.append(f"{'stopped' if seen.stopped else 'through'} ({said})")
        made.add_row(aimed, probe.__name__.replace("_", " "), *cells)
    return made


async def measure(cases: Cases, names: Sequence[str]) -> bool:
    """Try all; whether none is weaker than it says."""
    found: dict[str, tuple[Sequence[Finding], Guarantees]] = {}
    good = True
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            seen = await tried(cases, name, Path(root) / name)
            if seen is None:
                continue
            findings, mismatches, declared = seen
            found[name] = findings, declared
            for each in mismatches:
                kind = "weaker" if each.weaker else "stronger"
                print(f"{name}, observed {kind}: {each.text}", file=sys.stderr)
                good = good and not each.weaker
    if not found:
        raise SystemExit("none of these backends is on this machine")
    Console(file=sys.stderr, width=60 + 26 * len(found)).print(table(found))
    return good


def main() -> None:
    """Run it."""
    flags = parser("the abuse suite over every sandbox backend of this machine; always at full length")
    flags.add_argument("--backend", action="append", choices=BACKENDS, help="only this one (repeatable)")
    chosen = flags.parse_args()
    cases = Cases("sandbox-abuse")
    good = asyncio.run(measure(cases, chosen.backend or list(BACKENDS)))
    cases.finish(chosen.keep)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
