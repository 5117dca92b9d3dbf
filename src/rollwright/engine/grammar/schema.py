"""JSON schemas as constraints: what is refused, what is narrowed, how much a token can open.

Role: makes of a schema one whose every feature is held to. Neighbours: `sources` puts it into a grammar.
Invariant: what comes out allows a subset of what went in. Keywords are those of JSON Schema 2020-12 and
`definitions`; llguidance itself refuses others that it knows and does not hold to.

Narrowed: an object that lists `properties` has no others unless it says so (OpenAI's strict mode, and what a
tool can take); integers lie within ±(2^53 - 1), those that every JSON reader keeps (RFC 7493, 2.2), and other
numbers are written without exponent within the same bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

import msgspec

from rollwright.errors import ConstraintError
from rollwright.types import Json

LIMITLESS = 1_000_000
"""Need of what cannot be written within a bound."""
_PATTERN = 24
"""Bytes assumed for a string that matches a pattern or format."""
_EXACT = 2**53 - 1
_REFUSED = frozenset(
    (
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor", "$vocabulary"),
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("additionalItems", "unevaluatedItems", "unevaluatedProperties", "propertyNames"),
        *("dependentSchemas", "dependentRequired", "dependencies", "x-guidance"),
    )
)
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def read(source: str) -> Json:
    """The JSON value of a source.

    Raises:
        ConstraintError: it is not JSON.
    """
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConstraintError(f"a constraint's source is not JSON: {error}") from error


def narrowed(schema: Json, where: str = "#") -> Json:
    """The schema that decoding is held to.

    Raises:
        ConstraintError: no schema, or a keyword that cannot be held to; the text names it and its place.
    """
    for place, node in _nodes(schema, where):
        _check(place, node)
    nodes = [node for _, node in _nodes(schema, where) if isinstance(node, dict)]
    joined = any("allOf" in node or ("$ref" in node and len(_said(node)) > 1) for node in nodes)
    return _narrow(schema, close=not joined)


def _said(node: dict[str, Json]) -> set[str]:
    """Keywords of a schema that say what is allowed."""
    return node.keys() - {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description"}


def _nodes(schema: Json, where: str) -> Iterator[tuple[str, Json]]:
    """Every schema in a schema, with its place."""
    yield where, schema
    if isinstance(schema, dict):
        for key, name, inner in _inner(schema):
            yield from _nodes(inner, f"{where}/{key}" + (f"/{name}" if name else ""))


def _inner(schema: dict[str, Json]) -> Iterator[tuple[str, str, Json]]:
    """(keyword, name or index, schema) of each schema directly in a schema."""
    for key in _NAMED:
        named = schema.get(key)
        if isinstance(named, dict):
            yield from ((key, name, inner) for name, inner in named.items())
    for key in _LISTS:
        listed = schema.get(key)
        if isinstance(listed, list):
            yield from ((key, str(i), inner) for i, inner in enumerate(listed))
    yield from ((key, "", schema[key]) for key in _ONE if key in schema)


def _check(where: str, node: Json) -> None:
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        raise ConstraintError(f"{where}: a schema is an object, true or false, got {json.dumps(node)[:80]}")
    if refused := sorted(_REFUSED & node.keys()):
        raise ConstraintError(f"{where}: {refused[0]!r} cannot be enforced while decoding; leave it out")
    for key in _BOUNDS:
        if isinstance(node.get(key), bool):
            raise ConstraintError(f"{where}: {key!r} is a number since draft 6, got a boolean")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ConstraintError(f"{where}: 'required' is a list of names")
    if node.get("minProperties", 0) > len(set(required)):
        raise ConstraintError(f"{where}: 'minProperties' above the required ones cannot be enforced")


def _narrow(schema: Json, close: bool) -> Json:
    if not isinstance(schema, dict):
        return schema
    node = dict(schema)
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            node[key] = {name: _narrow(inner, close) for name, inner in node[key].items()}
    for key in _LISTS:
        if isinstance(node.get(key), list):
            node[key] = [_narrow(inner, close) for inner in node[key]]
    for key in _ONE:
        if key in node:
            node[key] = _narrow(node[key], close)
    if any(key in node for key in _COMBINED):
        return node
    listed = "properties" in node and set(node.get("required", ())) <= node["properties"].keys()
    if close and listed and not {"additionalProperties", "patternProperties"} & node.keys():
        node["additionalProperties"] = False
    if node.get("type") in ("integer", "number") and not {"enum", "const"} & node.keys():
        if not {"minimum", "exclusiveMinimum"} & node.keys():
            node["minimum"] = min(-_EXACT, *(node[key] for key in _BOUNDS if key in node), 0)
        if not {"maximum", "exclusiveMaximum"} & node.keys():
            node["maximum"] = max(_EXACT, *(node[key] for key in _BOUNDS if key in node), 0)
    return node


def growth(schema: Json) -> int:
    """Bytes that one more token can add to the shortest end of a word, as estimated from the schema: the
    dearest value it can begin, with its key. What the whole word needs is not added by a token."""
    most = 1
    for _, node in _nodes(schema, "#"):
        if isinstance(node, dict):
            for _, name, inner in _inner(node):
                most = max(most, len(name) + 6 + need(inner, schema, frozenset()) % LIMITLESS)
            most = max(most, *(len(json.dumps(value)) for value in node.get("enum", [])), 1)
    return most


def need(schema: Json, root: Json, seen: frozenset[str]) -> int:
    """Bytes of a short value of `schema`, as estimated; 1,000,000 and more where it has none without end."""
    if not isinstance(schema, dict):
        return 2 if schema is True else LIMITLESS
    if "const" in schema:
        return len(json.dumps(schema["const"]))
    if "enum" in schema:
        return min((len(json.dumps(value)) for value in schema["enum"]), default=LIMITLESS)
    total = 0
    if "$ref" in schema:
        name = schema["$ref"]
        if name in seen:
            return LIMITLESS
        total += need(_resolved(name, root), root, seen | {name})
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            total += min(need(inner, root, seen) for inner in schema[key])
    total += sum(need(inner, root, seen) for inner in schema.get("allOf", []))
    kinds = schema.get("type", [] if total else ["string"])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return total + min((_need_of(kind, schema, root, seen) for kind in kinds), default=0)


def _need_of(kind: str, schema: dict[str, Json], root: Json, seen: frozenset[str]) -> int:
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        return 2 + sum(len(json.dumps(k)) + 2 + need(properties.get(k, True), root, seen) for k in required)
    if kind == "array":
        first = schema.get("prefixItems", [])
        count = schema.get("minItems", 0)
        items = [*first[:count], *[schema.get("items", True)] * max(0, count - len(first))]
        return 2 + sum(need(item, root, seen) + 1 for item in items)
    if kind == "string":
        guess = _PATTERN if {"pattern", "format"} & schema.keys() else 0
        return 2 + max(guess, cast(int, schema.get("minLength", 0)))
    if kind in ("integer", "number"):
        return max([1, *(len(str(schema[key])) for key in _BOUNDS[::2] if key in schema)]) % 18
    return 5


def _resolved(name: str, root: Json) -> Json:
    """What a local reference names; True where it is none (the library says so)."""
    at = root
    for step in name.removeprefix("#").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if step and isinstance(at, dict):
            at = at.get(step, True)
    return at
