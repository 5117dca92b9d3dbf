"""The one door: every action of an agent goes through `invoke`, in one order.

Role: identity → guard → idempotency → registry → deadline → execution → audit → trace. Neighbours: agents
call it; the registry gives it the only mint; guard and audit are handed in. Invariants: nothing runs before
the guard allowed it and before "asked" is in the audit; an action id has its effect once per attempt;
whatever the agent did wrong is an observation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from msgspec.structs import replace

from rollwright.clock import Clock, SystemClock
from rollwright.errors import DoorError, SandboxLost
from rollwright.events import NullSink, Sink, SpanEnded
from rollwright.guard.base import Audit, Guard, GuardEvent
from rollwright.sandbox.base import Sandbox
from rollwright.tools import observe
from rollwright.tools.base import Action, SandboxHandle
from rollwright.tools.registry import ToolRegistry, nearest
from rollwright.tools.sealed import canonical, digest
from rollwright.types import CallStatus, Decision, Json, SideEffect, ToolResult, ToolSpec, Verdict

GRACE_SECONDS = 1.0
"""The sandbox ends work at its deadline; a tool that still runs so much later is cut off by the door."""
_REMEMBERED = 10_000
"""Attempts whose action ids are kept; beyond, the one that acted least recently is forgotten."""


@dataclass(frozen=True)
class _Asked:
    """An action id that was seen: what it asked for, and what came or will come of it."""

    wanted: str
    result: asyncio.Future[ToolResult]


class ToolDoor:
    """See `rollwright.tools.base.Door`. One for each registry."""

    def __init__(
        self,
        registry: ToolRegistry,
        guard: Guard,
        audit: Audit,
        *,
        clock: Clock | None = None,
        events: Sink | None = None,
        guard_timeout: float = 1.0,
    ) -> None:
        self._registry, self._mint = registry, registry.claim_mint()
        self._guard, self._guard_timeout = guard, guard_timeout
        self._audit = audit
        self._clock = clock or SystemClock()
        self._events = events or NullSink()
        self._seen: OrderedDict[tuple[str, str, int], dict[str, _Asked]] = OrderedDict()

    def specs(self, names: tuple[str, ...]) -> tuple[ToolSpec, ...]:
        return self._registry.specs(names)

    async def invoke(self, action: Action) -> ToolResult:
        self._identify(action)
        began, call = self._clock.now(), action.call
        asked = canonical(call.arguments)
        arguments = digest(asked)
        self._note("asked", action, tool=call.name, arguments=asked, digest=arguments)
        rule, status, result = "", "failed", None
        try:
            verdict = await self._decide(action)
            rule = verdict.rule
            decided = verdict.decision.name.lower()
            self._note("decided", action, decision=decided, rule=rule, reason=verdict.reason)
            if verdict.decision > Decision.MODIFY:
                result = self._denied(action, verdict)
            else:
                if verdict.decision is Decision.MODIFY and verdict.arguments is not None:
                    action = replace(action, call=replace(call, arguments=verdict.arguments))
                    arguments = digest(canonical(verdict.arguments))
                result = await self._once(action, arguments)
            seconds = self._clock.now() - began
            result = replace(result, call=call.id, seconds=seconds)
            status = result.status.value
            return result
        except (SandboxLost, asyncio.CancelledError) as failure:
            status = "lost" if isinstance(failure, SandboxLost) else "cancelled"
            raise
        finally:
            self._close(action, status, rule, self._clock.now() - began, result)

    def _identify(self, action: Action) -> None:
        identity = action.identity
        missing = [name for name in ("run", "task", "rollout", "trace") if not getattr(identity, name)]
        if missing:
            raise DoorError(
                f"an action needs an identity with run, task, rollout and trace; missing: {missing}"
            )
        if identity.task != action.task.id:
            raise DoorError(f"the action's task is '{action.task.id}', its identity says '{identity.task}'")

    async def _decide(self, action: Action) -> Verdict:
        """The guard's verdict; a guard that fails or is late denies."""
        spec = self._registry.spec(action.call.name)
        event = GuardEvent(
            identity=action.identity,
            call=action.call,
            allowed_tools=action.task.tools,
            side_effect=spec.side_effect if spec else SideEffect.ONCE,
        )
        rule = f"{self._guard.name}/failed"
        try:
            async with asyncio.timeout(self._guard_timeout):
                verdict: object = await self._guard.check(event, action.history)
        except TimeoutError:
            reason = f"no verdict within {self._guard_timeout:g} s"
            return Verdict(decision=Decision.DENY, rule=rule, reason=reason)
        except Exception as failure:  # boundary: a guard that crashes denies
            return Verdict(decision=Decision.DENY, rule=rule, reason=f"the guard crashed: {failure!r}")
        if not isinstance(verdict, Verdict):
            return Verdict(decision=Decision.DENY, rule=rule, reason=f"no verdict but {verdict!r}")
        return verdict

    def _denied(self, action: Action, verdict: Verdict) -> ToolResult:
        reason = verdict.reason
        if verdict.decision is Decision.CONFIRM:
            reason = f"needs a confirmation, and nobody is there to give it. {reason}"
        text = f"denied by {verdict.rule}: {reason}" if reason else f"denied by {verdict.rule}"
        result = observe.failure(action.call, CallStatus.DENIED, text)
        return replace(result, terminated=verdict.decision is Decision.TERMINATE)

    async def _once(self, action: Action, arguments: str) -> ToolResult:
        """`arguments` is their digest. Execute, unless this attempt asked for the same action id before:
        then what came of that."""
        call, identity = action.call, action.identity
        key = (identity.run, identity.rollout, identity.attempt)
        asked = self._seen.setdefault(key, {})
        self._seen.move_to_end(key)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        wanted = f"{call.name} {arguments}"
        first = asked.get(call.id)
        if first is None:
            first = asked[call.id] = _Asked(wanted, asyncio.get_running_loop().create_future())
            return await self._first(action, arguments, first.result)
        if first.wanted != wanted:
            return observe.failure(call, CallStatus.MALFORMED, "this action id was used for another call")
        return replace(await asyncio.shield(first.result), repeated=True)

    async def _first(self, action: Action, arguments: str, future: asyncio.Future[ToolResult]) -> ToolResult:
        try:
            result = await self._execute(action, arguments)
        except asyncio.CancelledError:
            # it may have had its effect, so it must not run again
            future.set_result(observe.failure(action.call, CallStatus.LOST, "the first try was cancelled"))
            raise
        except BaseException as failure:  # boundary: the repetitions fail alike
            future.set_exception(failure)
            future.exception()  # there may be none
            raise
        future.set_result(result)
        return result

    async def _execute(self, action: Action, arguments: str) -> ToolResult:
        """Registry, deadline, execution."""
        call = action.call
        if self._registry.spec(call.name) is None:
            known = nearest(call.name, filter(self._registry.spec, action.task.tools))
            return observe.failure(call, CallStatus.UNKNOWN_TOOL, f"no tool '{call.name}'{known}".rstrip(";"))
        if problem := self._registry.problem(call.name, call.arguments):
            return observe.failure(call, CallStatus.MALFORMED, problem)
        permit = self._mint.permit(call.id, call.name, arguments)
        opened = replace(action, sandbox=_opened(action.sandbox))
        cut = asyncio.timeout(None)
        timer = asyncio.create_task(self._expire(cut, action.timeout + GRACE_SECONDS))
        try:
            async with cut:
                result: object = await self._registry.redeem(permit, call.arguments, opened)
        except (SandboxLost, DoorError):
            raise
        except Exception as failure:  # boundary: a tool that raises is an observation, ours or a plug-in's
            if cut.expired():
                return observe.failure(call, CallStatus.TIMEOUT, "timeout")
            return observe.failure(call, CallStatus.ERROR, f"{type(failure).__name__}: {failure}")
        finally:
            timer.cancel()
            self._mint.revoke(permit)
        if not isinstance(result, ToolResult):
            return observe.failure(
                call, CallStatus.ERROR, f"the tool gave {type(result).__name__}, no ToolResult"
            )
        return result

    async def _expire(self, cut: asyncio.Timeout, seconds: float) -> None:
        """What makes `cut` a deadline by the injected clock."""
        await self._clock.sleep(seconds)
        cut.reschedule(asyncio.get_running_loop().time())

    def _note(self, kind: str, action: Action, **body: Json) -> None:
        self._audit.append(kind, action.identity, action.call.id, body)

    def _close(
        self, action: Action, status: str, rule: str, seconds: float, result: ToolResult | None
    ) -> None:
        """The last entry of the audit, and the span."""
        came = canonical(result) if result else ""
        repeated = result.repeated if result else False
        body = {"status": status, "seconds": round(seconds, 6), "repeated": repeated}
        self._note("done", action, **body, content=result.content if result else "", digest=digest(came))
        span = action.trace.child()
        attributes: dict[str, Json] = {"status": status, "rollout": action.identity.rollout}
        attributes |= {"call": observe.clean(action.call.id), "rule": observe.clean(rule)}
        self._events.emit(
            SpanEnded(
                trace=action.identity.trace,
                name=f"tool.{observe.clean(action.call.name)}",
                span=span.span,
                parent=action.trace.span,
                seconds=seconds,
                attributes=attributes,
            )
        )


def _opened(sandbox: Sandbox) -> Sandbox:
    """The sandbox behind an agent's handle."""
    return sandbox._sealed if isinstance(sandbox, SandboxHandle) else sandbox
