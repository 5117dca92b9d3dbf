"""A server that speaks E2B's API and its envd protocol, as SDK 2.63 has them; its machines are folders."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from e2b.envd.process import process_connect, process_pb
from fake_http import FakeServer, Request, Response
from fake_machine import FakeMachine
from protobuf import Oneof

KEY = "e2b_000000000000000000000000000000000000cafe"
_TIME = "2026-01-01T00:00:00Z"


class FakeE2B(process_connect.Process):
    """One team's sandboxes."""

    def __init__(self, root: Path) -> None:
        self._root, self._ids = root, itertools.count()
        self.machines: dict[str, FakeMachine] = {}
        self._made: dict[str, str] = {}
        self.denied: dict[str, bool] = {}
        """Id → whether it was made without the internet."""
        application = process_connect.ProcessASGIApplication(self)
        self.server = FakeServer(self._answer, {application.path: application})

    async def start(self, request: Any, ctx: Any, /) -> AsyncIterator[Any]:
        """Run a process and stream what it says."""
        machine = self.machines.get(ctx.request_headers["e2b-sandbox-id"])
        if machine is None or machine.paused:
            from connectrpc.code import Code
            from connectrpc.errors import ConnectError

            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        event = process_pb.ProcessEvent
        yield _event(Oneof("start", event.StartEvent(pid=1)))
        async with contextlib.aclosing(machine.stream([request.process.cmd, *request.process.args])) as said:
            async for _, piece in said:
                if isinstance(piece, int):
                    yield _event(Oneof("end", event.EndEvent(exit_code=piece, exited=True, status="exited")))
                else:
                    yield _event(Oneof("data", event.DataEvent(output=Oneof("stdout", piece))))

    async def send_signal(self, request: Any, ctx: Any, /) -> Any:
        """Accepted."""
        return process_pb.SendSignalResponse()

    async def _answer(self, request: Request) -> Response:
        parts = [unquote(each) for each in request.path.split("/") if each]
        if parts[0] in ("files", "health"):
            return self._envd(request, parts[0])
        if request.headers.get("x-api-key") != KEY:
            return Response(401, {"code": 401, "message": "invalid API key"})
        if parts[0] == "v2":
            parts = parts[1:]
        if len(parts) == 1:
            return self._make(request) if request.method == "POST" else self._list(request)
        machine = self.machines.get(parts[1])
        if machine is None:
            return Response(404, {"code": 404, "message": "sandbox not found"})
        return self._one(machine, parts[2] if len(parts) > 2 else "", request)

    def _make(self, request: Request) -> Response:
        body, key = request.json, request.headers.get("idempotency-key", "")
        if body["templateID"] == "nonsense":
            return Response(404, {"code": 404, "message": "template 'nonsense' not found"})
        if key not in self._made:
            machine = FakeMachine(f"sandbox{next(self._ids)}", self._root, body["metadata"])
            machine.seconds = body["timeout"]
            self.machines[machine.id] = machine
            self.denied[machine.id] = body.get("allow_internet_access") is False
            self._made[key] = machine.id
        return Response(201, _described(self._made[key]))

    def _list(self, request: Request) -> Response:
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(request.query.get("metadata", ""))}
        found = [each for each in self.machines.values() if wanted.items() <= each.labels.items()]
        return Response(200, [_detailed(each) for each in found])

    def _one(self, machine: FakeMachine, action: str, request: Request) -> Response:
        if request.method == "DELETE":
            del self.machines[machine.id]
            machine.kill()
            return Response(204)
        if action == "timeout":
            machine.seconds = request.json["timeout"]
            return Response(204)
        if action == "pause":
            machine.paused = True
            return Response(204)
        if action == "connect":
            machine.paused = False
            return Response(200, _described(machine.id))
        if action == "fork":
            made = [machine.copy(f"sandbox{next(self._ids)}") for _ in range(request.json["count"])]
            self.machines |= {each.id: each for each in made}
            return Response(201, [{"sandbox": _described(each.id)} for each in made])
        return Response(200, _detailed(machine))

    def _envd(self, request: Request, route: str) -> Response:
        machine = self.machines.get(request.headers.get("e2b-sandbox-id", ""))
        if machine is None or machine.paused:
            return Response(502, {"code": 502, "message": "The sandbox was not found"})
        if route == "health":
            return Response(204)
        path = machine.folder / request.query["path"]
        if request.method == "POST":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(request.upload()[1])
            return Response(200, [{"name": path.name, "type": "file", "path": str(path)}])
        if not path.is_file():
            return Response(404, {"code": 404, "message": "no such file"})
        return Response(200, path.read_bytes(), {"content-type": "application/octet-stream"})


def _event(payload: Any) -> Any:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=payload))


def _described(id: str) -> dict[str, Any]:
    return {"templateID": "base", "sandboxID": id, "clientID": "c", "envdVersion": "0.5.0"}


def _detailed(machine: FakeMachine) -> dict[str, Any]:
    return {
        **_described(machine.id),
        "startedAt": _TIME,
        "endAt": _TIME,
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "state": "paused" if machine.paused else "running",
        "metadata": machine.labels,
    }
