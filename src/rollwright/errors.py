"""Every error a person can meet, and the one place where a failure is attributed.

```
RollwrightError
├── ConfigError         (ValueError)    a file, key or value of the configuration is wrong
├── MissingExtra        (ImportError)   an optional dependency is not installed; says which extra
├── PluginError         (LookupError)   no implementation of that name
├── SchemaError         (ValueError)    a stored record has another schema version or is damaged
├── LineageError        (ValueError)    two policy versions that cannot be compared
├── EngineError
│   ├── EngineClosed                    the engine stopped while a request was waiting
│   ├── ContextOverflow (ValueError)    prompt and new tokens do not fit into the context
│   ├── ConstraintError (ValueError)    a constraint that cannot be read, or that the engine cannot hold to
│   └── WeightMismatch                  the engine's weights are not the trainer's: no traffic
├── SandboxError
│   ├── SandboxUnavailable              this machine cannot give the guarantees asked for
│   └── SandboxLost                     the sandbox died under a call
├── DoorError           (PermissionError)  an action was tried past `invoke`
├── DeadlineExceeded    (TimeoutError)  says what waited, since when and for what
├── StoreError                          queue, ledger or blob store refused
│   └── DamagedStore                    its file is not what was written
├── NoSignal                            nothing to learn from: no group has reward variance
└── LeaseRevoked                        the pool took a lease back
```

Role: names for failures. Neighbours: everyone raises them; the rollout factory turns them into a typed
`Outcome`. Invariant: `boundary` attributes each failure once, at the innermost boundary; outer ones leave
it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RollwrightError(Exception):
    """Root of the tree; `component` and `rollout` are filled in by `boundary`."""

    component: str | None = None
    rollout: str | None = None


class ConfigError(RollwrightError, ValueError):
    """A wrong file, key or value; the text says what was given, what was expected and what to do."""


class MissingExtra(RollwrightError, ImportError):
    """An optional dependency is missing."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'rollwright[{extra}]'")
        self.extra = extra


class PluginError(RollwrightError, LookupError):
    """No implementation is registered under that name."""


class SchemaError(RollwrightError, ValueError):
    """A stored record cannot be read by this version."""


class LineageError(RollwrightError, ValueError):
    """Policy versions of different runs or policies were compared."""


class EngineError(RollwrightError):
    """The inference engine failed."""


class EngineClosed(EngineError):
    """The engine stopped while a request was waiting."""


class ContextOverflow(EngineError, ValueError):
    """The prompt leaves no room in the context."""


class ConstraintError(EngineError, ValueError):
    """A constraint on the output is none, or one that this engine or tokenizer cannot hold to."""


class WeightMismatch(EngineError):
    """The engine's weights differ from the trainer's; it gets no traffic."""


class SandboxError(RollwrightError):
    """A sandbox failed."""


class SandboxUnavailable(SandboxError):
    """The guarantees asked for cannot be given here."""


class SandboxLost(SandboxError):
    """The sandbox died under a call."""


class DoorError(RollwrightError, PermissionError):
    """An action was tried past `invoke`."""


class DeadlineExceeded(RollwrightError, TimeoutError):
    """Something waited longer than its deadline."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} did not finish within {seconds:g} s")
        self.what = what
        self.seconds = seconds


class StoreError(RollwrightError):
    """Queue, ledger or blob store refused."""


class DamagedStore(StoreError):
    """The file of a store is damaged."""


class NoSignal(RollwrightError):
    """No group has reward variance, so no gradient exists."""


class LeaseRevoked(RollwrightError):
    """The pool took a lease back."""


@contextmanager
def boundary(component: str, rollout: str | None = None) -> Iterator[None]:
    """Attribute any failure inside to `component` and `rollout`, once; it is always raised on."""
    try:
        yield
    except Exception as error:  # boundary: attributes and raises on
        if getattr(error, "component", None) is None:
            where = f"in {component}" + (f", rollout {rollout}" if rollout else "")
            error.add_note(where)
            for name, value in (("component", component), ("rollout", rollout)):
                if hasattr(error, "__dict__"):
                    setattr(error, name, value)
        raise
