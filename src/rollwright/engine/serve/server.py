"""Two ports over one engine: the public one, and the control one with a token of its own.

Role: sockets, and the order of starting and stopping. Neighbours: `rollwright serve` runs it, `front` speaks
HTTP. Invariants: without being told otherwise both ports are on loopback; a port that is taken
is said in one line before anything is served; stopping lets what is under way end within a deadline, aborts
the rest, and leaves no socket open.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.util import find_spec

from rollwright.clock import Clock
from rollwright.engine.base import Engine
from rollwright.engine.serve.app import App
from rollwright.engine.serve.auth import Token
from rollwright.engine.serve.bridge import Bridge
from rollwright.engine.serve.completions import Completions, TextModel
from rollwright.engine.serve.control import Control
from rollwright.engine.serve.desk import Desk
from rollwright.engine.serve.front import Front
from rollwright.engine.serve.public import Public
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.errors import ConfigError, MissingExtra
from rollwright.events import Noted, Sink

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """Where to listen; port 0 takes a free one."""

    host: str = LOOPBACK
    port: int = 0
    control_host: str = LOOPBACK
    control_port: int = 0


@dataclass(frozen=True)
class Keys:
    """The tokens of the two ports."""

    public: Token
    control: Token

    def __post_init__(self) -> None:
        if self.public.reveal() == self.control.reveal():
            raise ConfigError("the control port needs a token of its own: who may ask may not change weights")


class Server:
    """Serves `engine`, which it starts and closes. `text` opens `/v1/completions`; `weights` lets the control
    port update."""

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        clock: Clock,
        events: Sink,
        *,
        name: str = "policy",
        text: TextModel | None = None,
        weights: WeightsFolder | None = None,
    ) -> None:
        self._engine, self._clock, self._events = engine, clock, events
        self._desk = Desk(engine, clock, weights)
        self._keys, self._name, self._text = keys, name, text
        self._front: Front | None = None
        self._sockets: list[socket.socket] = []

    @property
    def url(self) -> str:
        """Of the public port."""
        return _url(self._sockets[0])

    @property
    def control_url(self) -> str:
        """Of the control port."""
        return _url(self._sockets[1])

    async def start(self, ports: Ports) -> None:
        """Listen and start the engine. Called in the engine's event loop, which is this one.

        Raises:
            ConfigError: a port is taken, or an address isn't this machine's.
            MissingExtra: uvicorn is missing.
        """
        if find_spec("uvicorn") is None:
            raise MissingExtra("serving over HTTP", "serve")
        try:
            self._sockets.append(_listen(ports.host, ports.port, "--port"))
            self._sockets.append(_listen(ports.control_host, ports.control_port, "--control-port"))
            await self._engine.start()
            self._front = Front(self._apps(), self._sockets, self._clock)
            await self._front.start()
        except BaseException:  # boundary: closes what was opened and raises on
            await self.stop(0.0)
            raise

    async def drained(self, seconds: float) -> None:
        """Take nothing more and let what is under way end, `seconds` at most; the ports stay open."""
        await self._desk.drain(seconds)

    async def stop(self, seconds: float) -> None:
        """Let what is under way end within `seconds`, then abort it, close everything. Idempotent."""
        front, self._front = self._front, None
        if front is not None:
            aborted = await self._desk.drain(seconds)
            if aborted:
                self._events.emit(Noted(level="warning", text=f"{aborted} requests were aborted at the end"))
            await front.stop()
        for each in self._sockets:
            each.close()
        await self._engine.close()

    def _apps(self) -> tuple[App, App]:
        """Of the public and the control port."""
        desk = Bridge(self._desk)
        routes = dict(Public(desk, self._name).routes())
        if self._text is not None:
            routes |= Completions(desk, self._text, self._clock).routes()
        return (
            App(self._keys.public, routes, self._clock, self._events),
            App(self._keys.control, Control(desk).routes(), self._clock, self._events),
        )


def free(ports: Ports) -> None:
    """Whether both can be listened on, asked before anything that takes long.

    Raises:
        ConfigError: a port is taken, or an address isn't this machine's.
    """
    _listen(ports.host, ports.port, "--port").close()
    _listen(ports.control_host, ports.control_port, "--control-port").close()


def loopback(host: str) -> bool:
    """Whether only this machine can reach `host`.

    Raises:
        ConfigError: no such host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine") from (
            error
        )
    return all(str(each[4][0]).startswith("127.") or each[4][0] == "::1" for each in found)


def _listen(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)
        bound.setblocking(False)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; give another {flag} or 0") from error
    return bound


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
