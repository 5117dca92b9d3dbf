"""Which sandbox, with which limits.

Role: configuration of entry-point group `rollwright.sandboxes`. Neighbours: the conductor calls `build`.
Invariant: nothing but `unsafe = true` leads to a sandbox without isolation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollwright.clock import Clock
from rollwright.plugins import PartConfig
from rollwright.pool.base import Lease
from rollwright.sandbox.base import Limits, SandboxProvider

GuaranteeName = Literal["fs", "net", "pids", "memory", "disk", "kill", "kernel_surface"]


class _Common(PartConfig):
    cpu_seconds: int = Field(60, ge=1)
    """CPU seconds each process of a sandbox may use in all; a call past it ends with TIMEOUT."""
    memory_mib: int = Field(512, ge=64)
    """MiB of address space of each process; more ends the call with MEMORY."""
    file_mib: int = Field(32, ge=1)
    """MiB of the largest file that may be written or read."""
    processes: int = Field(16, ge=1)
    """Processes of one sandbox; not enforced for root, see the probed guarantee `pids`."""
    output_kib: int = Field(64, ge=1)
    """KiB (characters) one call may print; more ends it with OUTPUT."""
    max_live: int = Field(256, ge=1)
    """Sandboxes alive at once; `create` waits beyond."""

    def limits(self) -> Limits:
        """As the sandbox takes them."""
        return Limits(
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_mib * 2**20,
            file_bytes=self.file_mib * 2**20,
            processes=self.processes,
            output_bytes=self.output_kib * 2**10,
        )


class LandlockSandbox(_Common):
    """Landlock, seccomp and rlimits."""

    type: Literal["landlock"] = "landlock"
    require: tuple[GuaranteeName, ...] = ("fs", "net", "kill")
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider that keeps its sandboxes below `root`."""
        from rollwright.sandbox.local import LandlockProvider

        return LandlockProvider(
            root,
            limits=self.limits(),
            require=self.require,
            max_live=self.max_live,
            lease=lease,
            clock=clock,
        )


class ProcessSandbox(_Common):
    """Bare processes: no isolation."""

    type: Literal["process"] = "process"
    unsafe: bool = False
    """Must be true: agent code may then do whatever you may."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider that keeps its sandboxes below `root`; its `start` refuses unless `unsafe`."""
        from rollwright.sandbox.local import ProcessProvider

        return ProcessProvider(
            root, unsafe=self.unsafe, limits=self.limits(), max_live=self.max_live, lease=lease, clock=clock
        )


class AutoSandbox(LandlockSandbox):
    """The strongest backend this machine has."""

    type: Literal["auto"] = "auto"  # type: ignore[assignment]
    unsafe: bool = False
    """True allows bare processes where the kernel has no Landlock."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """Landlock where the kernel has it; else bare processes if `unsafe`, else `SandboxUnavailable`."""
        from rollwright.errors import SandboxUnavailable
        from rollwright.sandbox.confine import landlock_abi
        from rollwright.sandbox.local import LandlockProvider, ProcessProvider, no_landlock

        if landlock_abi() > 0:
            return LandlockProvider(
                root,
                limits=self.limits(),
                require=() if self.unsafe else self.require,
                max_live=self.max_live,
                lease=lease,
                clock=clock,
            )
        if not self.unsafe:
            raise SandboxUnavailable(no_landlock())
        return ProcessProvider(
            root, unsafe=True, limits=self.limits(), max_live=self.max_live, lease=lease, clock=clock
        )
