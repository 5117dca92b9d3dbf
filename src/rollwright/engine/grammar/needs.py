"""How many bytes the values of a JSON schema take, as estimated.

Role: says how much a token can open, for the budget. Neighbours: `sources` asks for each schema. Invariant:
each node is looked at a bounded number of times, however many references lead to it.
"""

from __future__ import annotations

import json

from rollwright.engine.grammar.schema import BOUNDS, inner_of, nodes_of, references
from rollwright.types import Json

LIMITLESS = 1_000_000
"""Need of what cannot be written within a bound; none is larger."""
_PATTERN = 24
"""Bytes assumed for a string that matches a pattern or format."""
_ROUNDS = 8
"""Most times that what references name is gone over; estimates only fall from one to the next."""


class Needs:
    """Estimates for the schemas within one, which is not changed meanwhile."""

    def __init__(self, root: dict[str, Json]) -> None:
        self._root = root
        self._named: dict[str, int] = {}
        self._known: dict[int, int] = {}
        named = list(references(root).items())
        for _ in range(_ROUNDS):
            named.reverse()  # the first round begins with what was come upon last: chains settle in one
            before = dict(self._named)
            self._known.clear()
            for name, target in named:
                self._named[name] = self.of(target)
            if before == self._named:
                break
        self._known.clear()

    def growth(self) -> int:
        """Bytes that one more token can add to the shortest end of a word, as estimated: the dearest value
        it can begin, with its key. What the whole word needs is not added by a token."""
        most = 1
        for _, node in nodes_of(self._root, "#"):
            if isinstance(node, dict):
                for _, name, inner in inner_of(node):
                    most = max(most, len(name) + 6 + self.of(inner) % LIMITLESS)
                most = max(most, *(len(json.dumps(value)) for value in node.get("enum", [])), 1)
        return most

    def of(self, schema: Json) -> int:
        """Bytes of a short value of `schema`, a node of the root; `LIMITLESS` where none has an end."""
        if not isinstance(schema, dict):
            return 2 if schema is True else LIMITLESS
        if id(schema) not in self._known:
            self._known[id(schema)] = min(LIMITLESS, self._of(schema))
        return self._known[id(schema)]

    def _of(self, schema: dict[str, Json]) -> int:
        if "const" in schema:
            return len(json.dumps(schema["const"]))
        if "enum" in schema:
            return min((len(json.dumps(value)) for value in schema["enum"]), default=LIMITLESS)
        total = self._named.get(schema["$ref"], LIMITLESS) if "$ref" in schema else 0
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                total += min(map(self.of, schema[key]))
        total += sum(map(self.of, schema.get("allOf", [])))
        kinds = schema.get("type", [] if total else ["string"])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return total + min((self._of_kind(kind, schema) for kind in kinds), default=0)

    def _of_kind(self, kind: str, schema: dict[str, Json]) -> int:
        if kind == "object":
            inner = schema.get("properties", {})
            names = schema.get("required", [])
            return 2 + sum(len(json.dumps(name)) + 2 + self.of(inner.get(name, True)) for name in names)
        if kind == "array":
            count = int(schema.get("minItems", 0))
            first = schema.get("prefixItems", [])[: max(0, count)]
            rest = max(0, count - len(first))
            return (
                2
                + sum(self.of(item) + 1 for item in first)
                + (rest * (self.of(schema.get("items", True)) + 1) if rest else 0)
            )
        if kind == "string":
            guess = _PATTERN if {"pattern", "format"} & schema.keys() else 0
            return 2 + max(guess, int(schema.get("minLength", 0)))
        if kind in ("integer", "number"):
            return max([1, *(len(str(schema[key])) for key in BOUNDS[::2] if key in schema)]) % 18
        return 5
