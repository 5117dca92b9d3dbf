"""Attempts at files outside: by path, through /proc, by climbing, over descriptors and devices.

Role: probes of the guarantee `fs`. Neighbours: `bait` lays out what they are after. Invariant: the secret is
never written into the code that looks for it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.probes import bait
from rollwright.testing.probes.base import SECONDS, Observation, agent, attacked, probe, ran
from rollwright.types import CallStatus

_BY_PATH = """
def append():
    with open(secret, 'ab') as file:
        file.write(b'!')
seen = [attempt(lambda: open(secret).read()), attempt(lambda: os.listdir(folder))]
for change in (
    append,
    lambda: os.truncate(secret, 0),
    lambda: os.chmod(secret, 0o4777),
    lambda: os.utime(secret, (1, 1)),
    lambda: os.chown(secret, 12345, 12345),
    lambda: os.setxattr(secret, 'user.a', b'1'),
    lambda: os.link(secret, 'mine'),
    lambda: os.rename(folder + '/doomed', folder + '/renamed'),
    lambda: os.unlink(folder + '/doomed'),
    lambda: os.mkdir(folder + '/made'),
    lambda: os.symlink(secret, folder + '/link'),
):
    attempt(change)
attempt(lambda: os.symlink(folder, 'way'))
seen += [attempt(lambda: open('way/secret').read()), attempt(lambda: open('mine').read())]
seen
"""


@probe
async def host_files(provider: SandboxProvider) -> Observation:
    """Read, change and add files by their path and through links."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside:
            seen = await ran(sandbox, agent(_BY_PATH, secret=str(outside.file), folder=str(outside.path)))
            read = outside.secret in seen or "doomed" in seen
            changed = outside.changed()
    return Observation("fs", not read and not changed, f"read: {read}, changed: {changed}")


@probe
async def password_hashes(provider: SandboxProvider) -> Observation:
    """/etc/shadow, which a host that runs as root could read."""
    code = "import hashlib\nattempt(lambda: hashlib.sha256(open('/etc/shadow', 'rb').read()).hexdigest())"
    async with attacked(provider) as sandbox:
        told = (await ran(sandbox, agent(code))).strip("'")
    return Observation("fs", len(told) != 64, "read" if len(told) == 64 else told)


_ENVIRONMENTS = """
import hashlib
found = []
listed = attempt(lambda: os.listdir('/proc'))
for name in {*(listed if isinstance(listed, list) else ()), *map(str, pids)}:
    if name.isdecimal():
        data = attempt(lambda: open(f'/proc/{name}/environ', 'rb').read())
        if isinstance(data, bytes):
            found.append(hashlib.sha256(data).hexdigest())
found
"""


@probe
async def host_environment(provider: SandboxProvider) -> Observation:
    """Variables of the host and of its other processes, in its own environment or through /proc."""
    async with attacked(provider) as sandbox:
        with bait.sleeper() as process:
            code = agent(_ENVIRONMENTS, pids=[os.getpid(), os.getppid(), process.pid])
            told = await ran(sandbox, code)
            own = await ran(sandbox, "import os; sorted(os.environ)")
    others = [process.environment, Path("/proc/self/environ").read_bytes()]
    read = any(hashlib.sha256(data).hexdigest() in told for data in others if data)
    strange = set(own.strip("[]").replace("'", "").split(", ")) - {"HOME", "LANG", "PATH", "TMPDIR"}
    return Observation("fs", not read, f"read: {read}, own variables beyond the four: {sorted(strange)}")


_THROUGH_PROC = """
found = []
listed = attempt(lambda: os.listdir('/proc'))
for name in {*(listed if isinstance(listed, list) else ()), *pids, 'self'}:
    if name.isdecimal() or name == 'self':
        for path in (f'/proc/{name}/root{secret}', f'/proc/{name}/cwd/' + '../' * 30 + secret.lstrip('/')):
            found.append(attempt(lambda: open(path).read()))
listed = attempt(lambda: os.listdir('/proc/1/fd'))
for number in listed if isinstance(listed, list) else ():
    found.append(attempt(lambda: open(f'/proc/1/fd/{number}/' + '../' * 30 + secret.lstrip('/')).read()))
{text for text in found if len(text) == 32}
"""


@probe
async def roots_of_processes(provider: SandboxProvider) -> Observation:
    """/proc/1/root, /proc/N/root, /proc/N/cwd and descriptors of pid 1."""
    async with attacked(provider) as sandbox:
        with bait.sleeper() as process, bait.folder() as outside:
            pids = [str(pid) for pid in (1, os.getpid(), os.getppid(), process.pid)]
            told = await ran(sandbox, agent(_THROUGH_PROC, secret=str(outside.file), pids=pids))
    return Observation("fs", outside.secret not in told, told[:200])


_CLIMB = """
relative = '../' * 40 + secret.lstrip('/')
read, write = os.pipe()
def look():
    text = attempt(lambda: open(relative).read())
    os.write(write, (text + ' ').encode())
def climb():
    look()
    attempt(lambda: os.mkdir('cell'))
    start = os.open('.', os.O_RDONLY)
    attempt(lambda: os.chroot('cell'))
    attempt(lambda: os.fchdir(start))
    for _ in range(40):
        attempt(lambda: os.chdir('..'))
    attempt(lambda: os.chroot('.'))
    os.write(write, (attempt(lambda: open(secret).read()) + ' ').encode())
    look()
    attempt(lambda: os.chroot(f'/proc/{os.getppid()}/root'))
    os.write(write, (attempt(lambda: open(secret).read()) + ' ').encode())
    for kind in (0x20000000, 0x10020000):  # a mount namespace of its own, and with a user namespace
        attempt(lambda: _libc.unshare(kind))
        attempt(lambda: os.mkdir('old'))
        attempt(lambda: call(155, b'.', b'old'))
        look()
    return 0
inside(climb)
os.close(write)
data = b''
while piece := os.read(read, 4096):
    data += piece
os.close(read)
data.decode()
"""


@probe
async def climbing_out_of_the_root(provider: SandboxProvider) -> Observation:
    """`..` beyond the root, chroot with a descriptor kept outside, the parent's root, pivot_root."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside:
            told = await ran(sandbox, agent(_CLIMB, secret=str(outside.file)))
    return Observation("fs", outside.secret not in told, told.replace(outside.secret, "(the secret)")[:200])


_DESCRIPTORS = """
import os, sys
path = '../' * 40 + {secret!r}.lstrip('/')
found = []
for number in range(1024):
    for look in (
        lambda: os.read(os.open(path, os.O_RDONLY, dir_fd=number), 64).decode(),
        lambda: os.pread(number, 64, 0).decode(),
    ):
        try:
            found.append(look())
        except (OSError, ValueError):
            pass
found
"""


@probe
async def descriptors_of_the_host(provider: SandboxProvider) -> Observation:
    """A folder and a file that the host has open and inheritable, from the interpreter and from a program."""
    with bait.folder() as outside:
        held = [os.open(path, os.O_RDONLY) for path in (outside.path, outside.file)]
        try:
            for number in held:
                os.set_inheritable(number, True)
            async with attacked(provider) as sandbox:
                code = _DESCRIPTORS.format(secret=str(outside.file))
                told = await ran(sandbox, code)
                interpreter = (await ran(sandbox, "import sys; sys.executable")).strip("'")
                command = [interpreter, "-I", "-S", "-c", f"{code}\nprint(found)"]
                shown = await sandbox.exec(command, timeout=SECONDS)
        finally:
            for number in held:
                os.close(number)
    if shown.status is not CallStatus.OK:
        told += f" (as a program: {shown.stderr[-100:]})"
    return Observation("fs", outside.secret not in told + shown.stdout, told[:200])


_TAKEN = """
found = []
for pid in pids:
    process = attempt(lambda: os.pidfd_open(pid))
    for number in numbers if isinstance(process, int) else ():
        taken = call(438, process, number, 0)
        if taken >= 0:
            found.append(attempt(lambda: os.pread(taken, 64, 0).decode()))
found
"""


@probe
async def descriptors_taken_from_the_host(provider: SandboxProvider) -> Observation:
    """pidfd_getfd of a file that the host has open."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside, outside.file.open() as file:
            code = agent(_TAKEN, pids=[os.getpid(), os.getppid(), 1], numbers=[file.fileno()])
            told = await ran(sandbox, code)
    return Observation("fs", outside.secret not in told, told.replace(outside.secret, "(the secret)")[:200])


_DEVICES = """
def device(kind, major, minor):
    os.mknod('device', kind | 0o600, os.makedev(major, minor))
    try:
        with open('device', 'rb', buffering=0) as file:
            return f'opened {major}:{minor}'
    finally:
        os.unlink('device')
found = [attempt(lambda: device(stat.S_IFCHR, 1, 5)), attempt(lambda: device(stat.S_IFCHR, 1, 1))]
found + [attempt(lambda: device(stat.S_IFBLK, *disk))]
"""


@probe
async def devices_of_its_own(provider: SandboxProvider) -> Observation:
    """mknod of a harmless device, of the machine's memory and of its disk; opened for reading only."""
    disk = os.stat("/").st_dev
    async with attacked(provider) as sandbox:
        told = await ran(sandbox, agent(_DEVICES, disk=[os.major(disk), os.minor(disk)]))
    return Observation("fs", "opened" not in told, told)


_KNOBS = """
def open_for_writing(path):
    os.close(os.open(path, os.O_WRONLY))
    return 'opened ' + path
def make(path):
    os.mkdir(path)
    os.rmdir(path)
    return 'opened ' + path
found = [attempt(lambda: open_for_writing(path)) for path in files]
found + [attempt(lambda: make(path + '/rollwright-bait')) for path in folders]
"""


@probe
async def settings_of_the_machine(provider: SandboxProvider) -> Observation:
    """Files of /proc and /sys that make the kernel run or do something; opened, not written."""
    files = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sysrq-trigger",
        "/proc/self/../sys/vm/drop_caches",
        "/sys/kernel/uevent_helper",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/fs/cgroup/release_agent",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/kvm",
        "/dev/vda",
        "/dev/sda",
        "/dev/fuse",
    ]
    parts = ("", "/memory", "/pids", "/freezer", "/unified")
    folders = [f"/sys/fs/cgroup{part}" for part in parts]
    async with attacked(provider) as sandbox:
        told = await ran(sandbox, agent(_KNOBS, files=files, folders=folders))
    return Observation("fs", "opened" not in told, told[:300])


@probe
async def files_of_another_sandbox(provider: SandboxProvider) -> Observation:
    """What a sandbox beside it wrote."""
    async with attacked(provider) as victim, attacked(provider) as sandbox:
        await victim.files.write("note", b"the neighbour's secret")
        place = (await ran(victim, "import os; os.getcwd()")).strip("'")
        code = "[attempt(lambda: open(place + '/note').read()), attempt(lambda: os.listdir(place))]"
        told = await ran(sandbox, agent(code, place=place))
    return Observation("fs", "secret" not in told and "'note'" not in told, told[:200])
