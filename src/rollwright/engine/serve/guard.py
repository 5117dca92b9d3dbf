"""One connection of a port, with an end to every wait for its client.

Role: uvicorn's HTTP/1.1 protocol, and what it leaves open: a head that doesn't come, an answer that nobody
reads, connections without number. Neighbours: `front` hands it to uvicorn. Invariant: a client that does
nothing holds a connection no longer than these bounds, however it does nothing.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long the head of a request may take, from the connection or its first byte on."""
READ_SECONDS = 30.0
"""How long a client may take nothing of an answer that waits for it."""
CONNECTIONS = 8192
"""Connections of a port; a request over more of them is answered 503."""
SPARE = 256
"""Connections beyond, so that there is an answer; more are closed at once."""


class Guarded(H11Protocol):
    """uvicorn's protocol with these bounds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        if len(self.connections) > CONNECTIONS + SPARE:
            transport.abort()
        else:
            self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came; they may have completed a head, or begun one."""
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting and self._head is not None:
            self._head.cancel()
            self._head = None
        elif waiting and self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        """More waits for the client than should."""
        super().pause_writing()
        if self._unread is None:
            self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has read."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _watch(self, left: int) -> None:
        """Look again whether less than `left` bytes wait for the client."""
        self._unread = self.loop.call_later(READ_SECONDS, self._look, left)

    def _look(self, left: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now < left:
            self._watch(now)
        else:
            self.transport.abort()

    def _disarm(self) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        self._head = self._unread = None
