"""The constraint that holds an agent's calls to the schemas of the tools that it is offered.

Role: tools → `Constraint` of kind `TOOLS`. Neighbours: `episode` sends it with every turn, preflight compiles
it before a run starts, the engine's grammars read it. Invariant: what it lets through, `calls.parse` reads
as text or as well-formed calls of these tools, and the registry accepts their arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollwright.types import Constraint, ConstraintKind, ToolSpec


def enforced(specs: Sequence[ToolSpec]) -> Constraint | None:
    """Text, and calls of `specs` with arguments that fit; None where there are no tools to hold to."""
    if not specs:
        return None
    tools = [{"name": spec.name, "parameters": spec.parameters} for spec in specs]
    return Constraint(kind=ConstraintKind.TOOLS, source=json.dumps(tools, ensure_ascii=False))
