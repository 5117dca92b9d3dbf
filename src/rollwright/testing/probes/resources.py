"""Attempts to use more than the limits allow: processes, memory, disk.

Role: probes of the guarantees `pids`, `memory` and `disk`. Neighbours: `base.TIGHT` has the limits.
Invariant: for each guarantee one attempt by a single process or file and one spread over many, so that a
limit of each is told from a limit of all together.
"""

from __future__ import annotations

from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.probes.base import SECONDS, TIGHT, Observation, agent, attacked, probe, short
from rollwright.types import CallStatus

_MIB = 2**20

_FORKS = """
made = []
try:
    while len(made) < wanted:
        pid = os.fork()
        if pid == 0:
            signal.alarm(15)
            time.sleep(600)
        made.append(pid)
except OSError:
    pass
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
len(made)
"""


@probe
async def four_hundred_children(provider: SandboxProvider) -> Observation:
    """One process forks 400 times."""
    async with attacked(provider) as sandbox:
        result = await sandbox.run_code(agent(_FORKS, wanted=400), timeout=SECONDS)
    made = int(result.value) if result.value else 0
    stopped = made <= TIGHT.processes and result.status is CallStatus.OK
    return Observation("pids", stopped, f"{made} of 400 ({short(result)})")


_TREE = """
read, write = os.pipe()
def grow(depth):
    signal.alarm(15)
    attempt(os.setsid)
    try:
        for _ in range(3 if depth else 0):
            os.write(write, b'!')
            if os.fork() == 0:
                grow(depth - 1)
    except OSError:
        os.write(write, b'x')
    os.write(write, b'.')
    time.sleep(600)
if os.fork() == 0:
    grow(4)
os.close(write)
made, settled = 1, 0
while settled < made and (data := os.read(read, 4096)):
    made, settled = made + data.count(b'!') - data.count(b'x'), settled + data.count(b'.')
made
"""


@probe
async def a_tree_of_processes(provider: SandboxProvider) -> Observation:
    """121 processes, each of a session of its own, made by one another."""
    async with attacked(provider) as sandbox:
        result = await sandbox.run_code(agent(_TREE), timeout=SECONDS)
    made = int(result.value) if result.value else 0
    return Observation("pids", 0 < made <= TIGHT.processes, f"{made} of 121 ({short(result)})")


@probe
async def memory_of_one_process(provider: SandboxProvider) -> Observation:
    """600 MB at once, written to."""
    async with attacked(provider) as sandbox:
        code = "len(b'x' * (600 * 2**20))"
        result = await sandbox.run_code(code, timeout=SECONDS)
    return Observation("memory", result.status is not CallStatus.OK, short(result))


_SPREAD = """
pipes, pids = [], []
for _ in range(6):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(15)
        data = attempt(lambda: bytearray(b'x') * (100 * 2**20))
        os.write(write, b'!' if len(data) > 100 else b'.')
        time.sleep(600)
    os.close(write)
    pids.append(pid)
    pipes.append(read)
held = sum(os.read(read, 1) == b'!' for read in pipes)
alive = sum(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in pids)
for pid in pids:
    attempt(lambda: os.kill(pid, signal.SIGKILL))
    attempt(lambda: os.waitpid(pid, 0))
for read in pipes:
    os.close(read)
min(held, alive)
"""


@probe
async def memory_of_many_processes(provider: SandboxProvider) -> Observation:
    """600 MB in six processes at the same time."""
    async with attacked(provider) as sandbox:
        result = await sandbox.run_code(agent(_SPREAD), timeout=SECONDS)
    held = int(result.value) if result.value else 0
    stopped = 100 * _MIB * held <= TIGHT.memory_bytes
    return Observation("memory", stopped, f"{held} × 100 MB held ({short(result)})")


@probe
async def one_large_file(provider: SandboxProvider) -> Observation:
    """More than one file may hold."""
    code = "with open('large', 'wb') as file:\n    file.write(bytes(size))\n    file.flush()"
    async with attacked(provider) as sandbox:
        result = await sandbox.run_code(agent(code, size=TIGHT.file_bytes + 1), timeout=SECONDS)
    return Observation("disk", result.status is not CallStatus.OK, short(result))


_FILL = """
import tempfile
def fill(place):
    written, block = 0, bytes(4 * 2**20)
    try:
        for number in range(wanted // len(block)):
            with open(f'{place}/rollwright-bait-{number}', 'wb', buffering=0) as file:
                written += file.write(block)
    except OSError:
        pass
    for number in range(wanted // len(block)):
        attempt(lambda: os.unlink(f'{place}/rollwright-bait-{number}'))
    return written
[fill(place) for place in places]
"""


async def _filled(provider: SandboxProvider, places: list[str], wanted: int) -> Observation:
    async with attacked(provider) as sandbox:
        code = agent(_FILL, places=places, wanted=wanted)
        result = await sandbox.run_code(code, timeout=SECONDS)
    written = [int(word) for word in (result.value or "").strip("[]").split(",") if word]
    detail = f"{sum(written) // _MIB} MB in {', '.join(places)} ({short(result)})"
    return Observation("disk", max(written, default=0) <= TIGHT.disk_bytes, detail)


@probe
async def two_hundred_megabytes_in_files(provider: SandboxProvider) -> Observation:
    """50 files of 4 MB in the working folder."""
    return await _filled(provider, ["."], 200 * _MIB)


@probe
async def megabytes_elsewhere(provider: SandboxProvider) -> Observation:
    """As much in each other place that may be open to writing."""
    places = ["/tmp", "/dev/shm", "/var/tmp", "/run", "/dev", "/proc", "/"]
    return await _filled(provider, places, 80 * _MIB)


_MANY = """
count = 0
try:
    for count in range(wanted):
        if count % 1000 == 0:
            os.mkdir(f'folder{count}')
        os.mknod(f'folder{count // 1000 * 1000}/{count}')
    count += 1
except OSError:
    pass
count
"""


@probe
async def five_thousand_files(provider: SandboxProvider) -> Observation:
    """More empty files than there may be."""
    async with attacked(provider) as sandbox:
        result = await sandbox.run_code(agent(_MANY, wanted=5_000), timeout=SECONDS)
    made = int(result.value) if result.value else 0
    return Observation("disk", made <= TIGHT.files, f"{made} of 5,000 ({short(result)})")
