"""One question to the helper, from a command line that the vendor's SDK runs.

Role: the only thing that crosses the vendor's API, one short command a question. Neighbours: `helper`
listens, `line` on the host writes the command and reads what it prints. Invariants: standard library only
and few modules of it, for it is started anew each time; what it prints is one line of JSON, and never
long: a long answer is left in a file whose name and size it prints.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import sys

SOCKET = "socket"
"""The helper's, in the folder that holds everything of ours."""
INLINE_BYTES = 192 * 2**10
"""A longer answer is left in a file."""


def receive(connection: socket.socket, limit: int) -> bytes:
    """One frame. Raises `EOFError` where the other end is closed, `ValueError` where it has more than `limit`
    bytes, `TimeoutError` after the socket's timeout."""
    (size,) = struct.unpack("!I", _exactly(connection, 4))
    if size > limit:
        raise ValueError(f"a frame of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 18))
        if not piece:
            raise EOFError("closed")
        data += piece
    return bytes(data)


def send(connection: socket.socket, body: bytes) -> None:
    """One frame."""
    connection.sendall(struct.pack("!I", len(body)) + body)


def ask(folder: str, word: str) -> str:
    """The line to print: what the helper answers to `word`, a request in base64, or `@in-` and its id: the
    file that holds it."""
    os.chdir(folder)
    if word.startswith("@"):
        try:
            with open(word[1:], "rb") as file:
                request = file.read()
            os.unlink(word[1:])
        except FileNotFoundError:  # asked before, and the answer got lost on its way
            request = json.dumps({"op": "wait", "id": word[4:]}).encode()
    else:
        request = base64.urlsafe_b64decode(word)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(SOCKET)
            send(connection, request)
            answer = receive(connection, 2**31)
    except (OSError, EOFError):
        return json.dumps({"state": "gone"})  # the agent can end it
    if len(answer) <= INLINE_BYTES:
        return answer.decode()
    name = "out-" + os.urandom(8).hex()
    with open(name, "wb") as file:
        file.write(answer)
    return json.dumps({"state": "file", "name": name, "size": len(answer)})


def main() -> None:
    """`python3 -I -S helper.zip ask FOLDER WORD`, `… start FOLDER SETTINGS`, `… work DESCRIPTOR SETTINGS`."""
    mode, *arguments = sys.argv[1:]
    if mode == "ask":
        line = ask(*arguments)
    else:
        from rollwright.sandbox.remote.inside import helper, limits  # the other modes need more modules

        line = {"start": helper.start, "work": limits.work}[mode](*arguments)
    sys.stdout.write(line + "\n")
