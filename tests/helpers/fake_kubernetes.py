"""An API server with the agent-sandbox controller's resources, and the sandbox router with its python
runtime, as SDK 1.0.8 has them; the pods are folders."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fake_http import FakeServer, Request, Response
from fake_machine import FakeMachine

POOL = "python-pool"
_CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
_SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"


class FakeKubernetes:
    """One cluster with one warm pool."""

    def __init__(self, root: Path) -> None:
        self._root, self._ids = root, itertools.count()
        self.claims: dict[str, dict[str, Any]] = {}
        self.machines: dict[str, FakeMachine] = {}
        """By the sandbox's name, which is not its claim's."""
        self.server = FakeServer(self._answer)

    def kubeconfig(self, path: Path) -> Path:
        """A file that leads here."""
        cluster = {"name": "c", "cluster": {"server": self.server.url}}
        user = {"name": "u", "user": {"token": "secret"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [cluster],
                    "users": [user],
                    "contexts": [context],
                    "current-context": "x",
                }
            )
        )
        return path

    async def _answer(self, request: Request) -> Response:
        if request.path.startswith(_CLAIMS):
            return self._claim(request, request.path[len(_CLAIMS) + 1 :])
        if request.path.startswith(_SANDBOXES):
            name = request.path[len(_SANDBOXES) + 1 :]
            return Response(200, {"metadata": {"name": name}}) if name in self.machines else _missing()
        return await self._routed(request)

    def _claim(self, request: Request, name: str) -> Response:
        if request.method == "POST":
            return self._make(request.json)
        if not name:
            return self._list(request)
        claim = self.claims.get(name)
        if claim is None:
            return _missing()
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            claim["spec"] |= request.json["spec"]
        if request.method == "DELETE":
            del self.claims[name]
            if claim["status"]:
                self.machines.pop(claim["status"]["sandbox"]["name"]).kill()
        return Response(200, claim)

    def _make(self, claim: dict[str, Any]) -> Response:
        about = claim["metadata"]
        if about["name"] in self.claims:
            return Response(409, {"reason": "AlreadyExists"})
        id = f"pod{next(self._ids)}"
        about |= {"uid": f"uid-{id}", "resourceVersion": "7"}
        wrong = {"type": "Ready", "status": "False", "reason": "WarmPoolNotFound", "message": "no such pool"}
        claim["status"] = {"conditions": [wrong]}
        if claim["spec"]["warmPoolRef"]["name"] == POOL:
            self.machines[id] = FakeMachine(id, self._root, about["labels"])
            ready = {"type": "Ready", "status": "True"}
            claim["status"] = {"sandbox": {"name": id}, "conditions": [ready]}
        self.claims[about["name"]] = claim
        return Response(201, {**claim, "status": {}})

    def _list(self, request: Request) -> Response:
        wanted = dict(each.split("=") for each in request.query.get("labelSelector", "").split(",") if each)
        name = request.query.get("fieldSelector", "").partition("=")[2]
        found = [
            claim
            for claim in self.claims.values()
            if wanted.items() <= claim["metadata"]["labels"].items()
            and name in ("", claim["metadata"]["name"])
        ]
        if request.query.get("watch"):
            return Response(200, self._watched(found))
        return Response(200, {"items": found})

    @staticmethod
    async def _watched(found: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)
        for claim in found:
            yield json.dumps({"type": "MODIFIED", "object": claim}).encode() + b"\n"

    async def _routed(self, request: Request) -> Response:
        machine = self.machines.get(request.headers.get("x-sandbox-id", ""))
        if machine is None:
            return Response(502, {"detail": "could not connect to the sandbox"})
        if request.path == "/execute":
            out, code = await machine.run(shlex.split(request.json["command"]))
            said = {"stdout": out.decode(), "stderr": "", "exit_code": code}
            return Response(200, said)
        if request.path == "/upload":
            name, data = request.upload()
            (machine.folder / name).write_bytes(data)  # makes no folders, as the real one
            return Response(200, {"message": "uploaded"})
        path = machine.folder / unquote(request.path.removeprefix("/download/"))
        if not path.is_file():
            return Response(404, {"message": "File not found"})
        return Response(200, path.read_bytes(), {"content-type": "application/octet-stream"})


def _missing() -> Response:
    return Response(404, {"reason": "NotFound"})
