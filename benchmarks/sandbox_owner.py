"""An owner of sandboxes to be killed: makes one after another, keeps some alive, says each in a line.

`python sandbox_owner.py BACKEND FOLDER SEED HELD`, on standard output: `begun` before each `create`, `ended`
after each `kill`. It goes on until it is killed. `lives` is the same for a host that stays.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path

from backends import started

from rollwright.sandbox.base import Sandbox, SandboxProvider
from rollwright.types import Environment, File

DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    os.execvp('sleep', ['sleep', '600'])
"""


async def life(provider: SandboxProvider, rng: random.Random) -> list[Sandbox]:
    """One sandbox that did what agents do; in some lives a fork of it beside it."""
    environment = Environment(
        files=(File(path="notes/a.txt", text="a"),), sql="CREATE TABLE t(a)" if rng.random() < 0.3 else ""
    )
    sandbox = await provider.create(environment, owner="leaks")
    made = [sandbox]
    await sandbox.run_code("print(1)", timeout=20.0)
    await sandbox.files.write("written", b"x" * rng.randrange(1, 100_000))
    if rng.random() < 0.3:
        await sandbox.run_code(DAEMON, timeout=20.0)
    if rng.random() < 0.3:
        await sandbox.exec("sleep 600 & echo started", timeout=20.0)
    if rng.random() < 0.2:
        snapshot = await sandbox.snapshot()
        made.append(await provider.create(owner="leaks", snapshot=snapshot))
        await snapshot.drop()
    if rng.random() < 0.2:
        made += await sandbox.fork()
    return made


async def lives(
    provider: SandboxProvider, rng: random.Random, held: int, say: Callable[[str], None], count: int | None
) -> None:
    """Live `count` lives (None: on and on), `held` of them at once, the oldest ending first."""
    alive: list[list[Sandbox]] = []
    begun = 0
    while count is None or begun < count:
        say("begun")
        begun += 1
        alive.append(await life(provider, rng))
        while len(alive) > held:
            for sandbox in alive.pop(0):
                await sandbox.kill()
            say("ended")
    for made in alive:
        for sandbox in made:
            await sandbox.kill()
        say("ended")


async def main(backend: str, folder: str, seed: str, held: str) -> None:
    """Go on until killed."""
    async with started(backend, Path(folder)) as provider:
        await lives(provider, random.Random(seed), int(held), lambda line: print(line, flush=True), None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
