"""Which local backend is the strongest one here.

Role: the choice of `sandbox.type=auto`. Neighbours: `config` makes the candidates, `doctor` shows them all.
Invariants: a backend is chosen for what its probe observes, never for being there; what was chosen, and what
it keeps, is logged once; without one that keeps what is required nothing starts, unless bare processes are
allowed by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rollwright.errors import SandboxUnavailable
from rollwright.plugins import PartConfig
from rollwright.sandbox.base import GuaranteeName, Guarantees, Limits, Sandbox, SandboxProvider, Snapshot
from rollwright.sandbox.config import BubblewrapSandbox, LandlockSandbox, NativeSandbox, ProcessSandbox
from rollwright.types import Environment

_log = logging.getLogger(__name__)
_logged: set[str] = set()


def candidates() -> list[PartConfig]:
    """Configurations of the local backends, strongest first; `auto` itself takes no bubblewrap."""
    return [NativeSandbox(), BubblewrapSandbox(), LandlockSandbox(), ProcessSandbox()]


class AutoProvider:
    """The first of `candidates`, strongest first, that starts."""

    def __init__(self, candidates: Sequence[tuple[str, SandboxProvider]]) -> None:
        self._candidates = candidates
        self._chosen: SandboxProvider | None = None

    @property
    def _provider(self) -> SandboxProvider:
        if self._chosen is None:
            raise SandboxUnavailable("no backend was chosen: start comes first")
        return self._chosen

    async def start(self) -> None:
        """Raises `SandboxUnavailable` with what each backend said."""
        said = []
        for name, provider in self._candidates:
            try:
                await provider.start()
            except SandboxUnavailable as error:
                said.append(f"{name}: {error}")
                continue
            self._chosen = provider
            self._tell(name, provider.guarantees, said)
            return
        raise SandboxUnavailable("; ".join(said) or "there is no sandbox backend for this machine")

    @staticmethod
    def _tell(name: str, guarantees: Guarantees, said: Sequence[str]) -> None:
        kept = ", ".join(f"{f} {getattr(guarantees, f).value}" for f in guarantees.__struct_fields__)
        text = f"sandboxes: {name} ({kept})"
        if text not in _logged:
            _logged.add(text)
            _log.info("%s", "; ".join([text, *(f"not {each}" for each in said)]))

    @property
    def guarantees(self) -> Guarantees:
        return self._provider.guarantees

    @property
    def capacity(self) -> int:
        return self._candidates[0][1].capacity

    @property
    def live(self) -> int:
        return self._chosen.live if self._chosen is not None else 0

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> Sandbox:
        return await self._provider.create(
            environment, owner=owner, limits=limits, snapshot=snapshot, network=network, require=require
        )

    async def connect(self, id: str) -> Sandbox:
        return await self._provider.connect(id)

    async def load(self, path: Path) -> Snapshot:
        return await self._provider.load(path)

    async def close(self) -> None:
        if self._chosen is not None:
            await self._chosen.close()
