"""One rollout as text, turn by turn, for people.

Role: shows what the agent did. Neighbours: the conductor prints it, the report will. Invariant: shows only
what the record holds.
"""

from __future__ import annotations

from rollwright.types import Scored, Task


def transcript(task: Task, scored: Scored) -> str:
    """The task's messages, each turn with its calls and results, outcome and score, and what each failed
    check lacked."""
    lines = [f"{message.role:>9}  {message.content}" for message in task.messages]
    for turn in scored.rollout.turns:
        lines.append(f"assistant  {turn.text}")
        lines.extend(f"{'tool':>9}  {result.content}  [{result.status.value}]" for result in turn.results)
    parts = ", ".join(f"{part.name} {part.value:g}" for part in scored.score.parts)
    value = "unscorable: " + scored.score.reason if scored.score.value is None else f"{scored.score.value:g}"
    lines.append(
        f"  outcome  {scored.rollout.outcome.value}; reward {value}" + (f" ({parts})" if parts else "")
    )
    lines.extend(f"{'check':>9}  {part.name}: {part.detail}" for part in scored.score.parts if part.detail)
    return "\n".join(lines)
