"""Messages and sockets for processes that were just forked, at the least cost.

Role: JSON and descriptors between the host and what runs in sandboxes. Neighbours: `worker`, `zygote`,
`native`. Invariants: standard library only; what is written is what `json` would write.

A forked process copies each page of memory that it writes to, and in Python to look at an object is to write
its reference count: on a virtual machine a page costs about 4 µs, `json.loads` 60 pages, a `socket.socket`
130. So the C parts beneath them are called.
"""

from __future__ import annotations

import _socket
import json
import json.encoder
import struct
from collections.abc import Callable
from typing import Any

parse: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
"""`parse(text, 0)` gives the value that begins there, and where it ends."""

_make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
_write = _make and _make(
    None,
    json.JSONEncoder().default,
    json.encoder.encode_basestring_ascii,
    None,
    ": ",
    ", ",
    False,
    False,
    True,
)
_FD = struct.calcsize("i")


def loads(data: bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` or `StopIteration` for what is none."""
    return parse(data.decode(), 0)[0]


def dumps(value: Any) -> bytes:
    """The JSON text of a value."""
    if _write is None:  # another Python than CPython
        return json.dumps(value).encode()
    return "".join(_write(value, 0)).encode()


class Line:
    """The inner end of a SEQPACKET pair: one JSON message each way, with descriptors."""

    def __init__(self, descriptor: int) -> None:
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Its descriptor, which is somebody else's to close from now on."""
        return self._socket.detach()

    def receive(self, most: int = 1 << 18) -> tuple[bytes, list[int]]:
        """The next message, empty where the other end was closed, and the descriptors it carries."""
        data, ancillary, _, _ = self._socket.recvmsg(
            most, _socket.CMSG_SPACE(4 * _FD), _socket.MSG_CMSG_CLOEXEC
        )
        descriptors: list[int] = []
        for _, _, carried in ancillary:
            descriptors += struct.unpack(f"{len(carried) // _FD}i", carried)
        return data, descriptors

    def send(self, said: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """One message."""
        if not descriptors:
            self._socket.send(dumps(said))
            return
        rights = struct.pack(f"{len(descriptors)}i", *descriptors)
        self._socket.sendmsg([dumps(said)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
