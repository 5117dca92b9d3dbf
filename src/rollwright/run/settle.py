"""What is done with the ledger of a run whose processes are gone.

Role: the last act of a part of a run. Neighbours: the conductor calls it however the run ended. Invariant:
afterwards nothing is left running, no sandbox lives, and started rollouts equal the sum of dispositions.
"""

from __future__ import annotations

from rollwright.buffer.base import Commit, Drop, Store
from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.errors import StoreError
from rollwright.run.begin import reap
from rollwright.run.folder import RunFolder
from rollwright.types import Disposition, PolicyVersion


def settle(folder: RunFolder, config: RunConfig, clock: Clock) -> None:
    """Close the ledger: nothing is left running, and nothing queued if the run is finished (after a stop the
    queue waits for a resume).

    Raises:
        StoreError: started rollouts and dispositions don't agree.
    """
    if not folder.store.is_file():
        return
    reap(folder)
    store = config.queue.build(folder.store, clock, run=folder.id)
    try:
        store.reopen()
        last = store.last_commit()
        if last is not None and last.version.step >= config.loop.steps:
            _end_surplus(store, store.lineage().version(last.version.step), last.position)
        counts = store.counts()
        if not counts.balanced:
            raise StoreError(
                f"the ledger is not balanced: started {counts.started}, dispositions {counts.by}"
            )
    finally:
        store.close()


def _end_surplus(store: Store, version: PolicyVersion, position: int) -> None:
    """A finished run trains nothing any more: what still waits in the queue ends as surplus."""
    while queued := store.read(position, 100):
        ended = [
            Drop(
                rollout=member.rollout.identity.rollout,
                disposition=Disposition.SURPLUS,
                reason="run finished",
            )
            for each in queued
            for member in each.group.members
        ]
        position = queued[-1].position
        store.commit(
            Commit(version=version, position=position, trained=(), dropped=tuple(ended), checkpoint="")
        )
