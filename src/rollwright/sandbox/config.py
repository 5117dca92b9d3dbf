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
from rollwright.sandbox.base import GuaranteeName, Limits, SandboxProvider


class _Common(PartConfig):
    cpu_seconds: int = Field(60, ge=1)
    """CPU seconds each process of a sandbox may use in all; a call past it ends with TIMEOUT."""
    memory_mib: int = Field(512, ge=64)
    """MiB of memory: of all processes together where the guarantee `memory` is enforced, else of address
    space of each; more ends the call with MEMORY."""
    file_mib: int = Field(32, ge=1)
    """MiB of the largest file that may be written or read."""
    disk_mib: int = Field(256, ge=1)
    """MiB of all files together, where the guarantee `disk` is enforced."""
    files: int = Field(20_000, ge=16)
    """Files and folders, where the guarantee `disk` is enforced."""
    processes: int = Field(16, ge=1)
    """Processes of one sandbox; see the probed guarantee `pids`."""
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
            disk_bytes=self.disk_mib * 2**20,
            files=self.files,
            processes=self.processes,
            output_bytes=self.output_kib * 2**10,
        )


class NativeSandbox(_Common):
    """Namespaces, an own file system, seccomp, and cgroups where they may be made; Linux, with or without
    root."""

    type: Literal["native"] = "native"
    require: tuple[GuaranteeName, ...] = ("fs", "net", "kill", "pids", "disk")
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`."""
    networks: tuple[Literal["host"], ...] = ()
    """Networks that are granted to who asks for them by name, beyond "none" and "loopback"."""
    live: bool = False
    """Allow live forks. A sandbox and its live forks then share the limits of memory and processes, so
    `pids` is kept as best it can."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider whose zygote and log lie below `root`."""
        from rollwright.sandbox.native.provider import NativeProvider

        return NativeProvider(
            root,
            limits=self.limits(),
            require=tuple(name for name in self.require if name != "pids") if self.live else self.require,
            networks=self.networks,
            live=self.live,
            max_live=self.max_live,
            lease=lease,
            clock=clock,
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


class BubblewrapSandbox(_Common):
    """The walls of another program, `bwrap`, around each sandbox: a check on native."""

    type: Literal["bubblewrap"] = "bubblewrap"
    require: tuple[GuaranteeName, ...] = ("fs", "net", "kill")
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider that keeps its sandboxes below `root`; its `start` refuses where there is no `bwrap`."""
        from rollwright.sandbox.bubblewrap import BubblewrapProvider

        return BubblewrapProvider(
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


class AutoSandbox(_Common):
    """The strongest backend this machine has: native, else landlock."""

    type: Literal["auto"] = "auto"
    require: tuple[GuaranteeName, ...] = ("fs", "net", "kill")
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`."""
    unsafe: bool = False
    """True allows bare processes where neither works."""

    def candidates(self) -> list[NativeSandbox | LandlockSandbox | ProcessSandbox]:
        """Local backends, strongest first."""
        common = self.model_dump(exclude={"type", "unsafe", "require"}, exclude_unset=True)
        found: list[NativeSandbox | LandlockSandbox | ProcessSandbox] = [
            NativeSandbox(**common),
            LandlockSandbox(require=self.require, **common),
        ]
        return [*found, ProcessSandbox(unsafe=True, **common)] if self.unsafe else found

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider that chooses when it starts."""
        from rollwright.sandbox.auto import AutoProvider

        return AutoProvider(
            [(each.type, each.build(root, lease=lease, clock=clock)) for each in self.candidates()]
        )
