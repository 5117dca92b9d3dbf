"""What a put, a drop and a commit may change, as pure functions.

Role: the rules of the ledger, written once, so that every store agrees by construction. Neighbours:
`memory` and `sqlite` look up where rollouts stand, ask here, and write what comes back. Invariant: a
rollout that ended keeps its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from rollwright.buffer.base import Commit, Drop
from rollwright.errors import StoreError
from rollwright.types import Disposition, Group, Lineage

Lines = Mapping[str, Disposition]
"""Where each rollout stands; those the ledger does not know are absent."""


def some(names: Iterable[str]) -> str:
    """The first few of `names`, for an error text."""
    held = sorted(names)
    return ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")


def known(rollouts: Sequence[str], lines: Lines) -> None:
    """Raise `StoreError` unless every rollout was started, and none is named twice."""
    if missing := {rollout for rollout in rollouts if rollout not in lines}:
        raise StoreError(f"the ledger does not know {some(missing)}: start rollouts before anything else")
    if len(set(rollouts)) < len(rollouts):
        twice = {rollout for rollout in rollouts if rollouts.count(rollout) > 1}
        raise StoreError(f"named more than once: {some(twice)}; a rollout has one place")


def startable(rollouts: Sequence[str], lines: Lines) -> None:
    """Raise `StoreError` unless every rollout has an id that is new to the ledger and to the list."""
    if wrong := {r for r in rollouts if r in lines or not r or rollouts.count(r) > 1}:
        raise StoreError(f"cannot start '{some(wrong)}': every rollout needs an id that was never used")


def unwelcome(group: Group, lines: Lines, taken: bool) -> tuple[Drop, ...] | None:
    """How the rollouts of a group end that is not queued; None where it is welcome.

    `taken` says that this group id was queued before, by this or another attempt. Then rollouts still
    running are duplicates; a plain repeat has none, so it changes nothing. Where some rollout ended before
    its group came, the group is late: what is left of it has lost its baseline and ends too.

    Raises:
        StoreError: rollouts the ledger does not know, or that stand in the queue under another group.
    """
    rollouts = [member.rollout.identity.rollout for member in group.members]
    if not rollouts:
        raise StoreError(f"group {group.id} has no members: drop it instead of queueing it")
    known(rollouts, lines)
    running = [r for r in rollouts if lines[r] is Disposition.RUNNING]
    name = f"attempt {group.attempt} of group {group.id}"
    if taken:
        reason = f"{name}: the group was queued before"
        return tuple(Drop(rollout=r, disposition=Disposition.DUPLICATE, reason=reason) for r in running)
    queued = {r for r in rollouts if lines[r] is Disposition.QUEUED}
    if queued:
        raise StoreError(f"{name} holds {some(queued)}, already queued in another group")
    if len(running) == len(rollouts):
        return None
    first = next(r for r in rollouts if r not in running)
    reason = f"{name} came after {first} had ended as {lines[first].value}"
    return tuple(Drop(rollout=r, disposition=Disposition.LATE, reason=reason) for r in running)


def sift(drops: Sequence[Drop], lines: Lines) -> tuple[list[Drop], list[Drop]]:
    """Drops that end a rollout, and those that come too late.

    Raises:
        StoreError: an unknown rollout, or a disposition that `drop` cannot give.
    """
    ending: list[Drop] = []
    late: list[Drop] = []
    ended: set[str] = set()
    for drop in drops:
        known([drop.rollout], lines)
        _droppable(drop)
        if lines[drop.rollout].open and drop.rollout not in ended:
            ended.add(drop.rollout)
            ending.append(drop)
        else:
            late.append(drop)
    return ending, late


def _droppable(drop: Drop) -> None:
    if drop.disposition.open or drop.disposition is Disposition.TRAINED:
        raise StoreError(
            f"a drop cannot make {drop.rollout} {drop.disposition.value}; 'trained' needs a commit, "
            "and open is no end"
        )


def admit(
    commit: Commit,
    last: Commit | None,
    lines: Lines,
    *,
    queued: Iterable[str],
    newest: int,
    incarnation: int,
) -> Commit:
    """The commit as it will be kept, its checkpoint filled in from `last` where it has none.

    `lines` holds the rollouts it names; `queued` those standing in the queue up to its position; `newest`
    is the newest position; `incarnation` the one that may commit.

    Raises:
        StoreError: the commit would lose a rollout, train one twice, or turn time back; the text says which.
    """
    dropped = [drop.rollout for drop in commit.dropped]
    before = last.position if last else 0
    if not before <= commit.position <= newest:
        raise StoreError(
            f"commit at position {commit.position}: expected {before} (consumed) to {newest} (newest); "
            "positions never run backwards"
        )
    if commit.version.incarnation != incarnation:
        raise StoreError(
            f"commit by incarnation {commit.version.incarnation}, but the run is at {incarnation}: "
            "this trainer was replaced; stop it, or open an incarnation with fork()"
        )
    if last and commit.version < last.version:
        raise StoreError(f"commit of {commit.version} after {last.version}: versions never run backwards")
    if commit.trained and not commit.checkpoint:
        raise StoreError(
            f"commit of {len(commit.trained)} trained rollouts without a checkpoint: after a crash their "
            "gradient would be lost; give the digest of the checkpoint that holds it"
        )
    known([*commit.trained, *dropped], lines)
    for drop in commit.dropped:
        _droppable(drop)
    if ended := {r for r in (*commit.trained, *dropped) if not lines[r].open}:
        was = lines[min(ended)].value
        raise StoreError(f"commit names rollouts that ended before: {some(ended)} (the first as {was})")
    behind = set(queued)
    if ahead := set(commit.trained) - behind:
        raise StoreError(
            f"commit at position {commit.position} trains rollouts not queued up to there: {some(ahead)}"
        )
    if lost := behind - set(commit.trained) - set(dropped):
        raise StoreError(
            f"commit at position {commit.position} leaves rollouts behind it without an end: {some(lost)}; "
            "name each as trained or dropped"
        )
    return commit if commit.checkpoint else replace(commit, checkpoint=last.checkpoint if last else "")


def forked(lineage: Lineage, step: int, last: Commit | None) -> Lineage:
    """The lineage with a new incarnation that begins at `step`.

    Raises:
        StoreError: a step that no commit made durable.
    """
    newest = last.version.step if last else step
    if not 0 <= step <= newest:
        raise StoreError(f"fork at step {step}: expected 0 to {newest}, the last committed step")
    return lineage.fork(step)
