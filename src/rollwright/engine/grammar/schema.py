"""JSON schemas as constraints: what is refused, what is narrowed.

Role: makes of a schema one whose every feature is held to. Neighbours: `sources` puts it into a grammar,
`needs` estimates what its values take.
Invariant: what comes out allows a subset of what went in. Keywords are those of JSON Schema 2020-12 and
`definitions`; llguidance itself refuses others that it knows and does not hold to.

Narrowed: an object that lists `properties` has no others unless it says so (OpenAI's strict mode, and what a
tool can take); integers lie within ±(2^53 - 1), those that every JSON reader keeps (RFC 7493, 2.2), and other
numbers are written without exponent within the same bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from rollwright.errors import ConstraintError
from rollwright.types import Json

_DEEPEST = 500
"""Most levels, references followed: the library's recursion must stay within a thread's stack, which held at
1,200 and overflowed at 2,000 in 8 MiB."""
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
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


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
        ConstraintError: no schema, one too deep, or a keyword that cannot be held to; the text names it and
            its place.
    """
    for place, node in nodes_of(schema, where):
        _check(place, node)
    _check_depth(schema, where)
    nodes = [node for _, node in nodes_of(schema, where) if isinstance(node, dict)]
    joined = any("allOf" in node or ("$ref" in node and len(_said(node)) > 1) for node in nodes)
    return _narrow(schema, close=not joined)


def _said(node: dict[str, Json]) -> set[str]:
    """Keywords of a schema that say what is allowed."""
    return node.keys() - {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description"}


def nodes_of(schema: Json, where: str) -> Iterator[tuple[str, Json]]:
    """Every schema in a schema, with its place."""
    yield where, schema
    if isinstance(schema, dict):
        for key, name, inner in inner_of(schema):
            yield from nodes_of(inner, f"{where}/{key}" + (f"/{name}" if name else ""))


def inner_of(schema: dict[str, Json]) -> Iterator[tuple[str, str, Json]]:
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
    for key in BOUNDS:
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
            node["minimum"] = min(-_EXACT, *(node[key] for key in BOUNDS if key in node), 0)
        if not {"maximum", "exclusiveMaximum"} & node.keys():
            node["maximum"] = max(_EXACT, *(node[key] for key in BOUNDS if key in node), 0)
    return node


def _check_depth(schema: Json, where: str) -> None:
    """Refuse what could nest deeper than `_DEEPEST` levels when each reference is followed once."""
    levels = _levels(schema) + sum(_levels(target) for target in references(schema).values())
    if levels > _DEEPEST:
        raise ConstraintError(
            f"{where}: up to {levels} levels, references followed; at most {_DEEPEST} can be enforced"
        )


def _levels(schema: Json) -> int:
    """How deep schemas stand in each other; references are not followed."""
    most, open = 0, [(schema, 1)]
    while open:
        node, level = open.pop()
        most = max(most, level)
        if isinstance(node, dict):
            open += [(inner, level + 1) for _, _, inner in inner_of(node)]
    return most


def references(root: Json) -> dict[str, Json]:
    """What each `$ref` that can be reached names, in the order in which they are come upon."""
    found: dict[str, Json] = {}
    open = [root]
    while open:
        node = open.pop()
        if not isinstance(node, dict):
            continue
        name = node.get("$ref")
        if name is not None and not isinstance(name, str):
            raise ConstraintError(f"'$ref' is a string, got {json.dumps(name)[:80]}")
        if name is not None and name not in found:
            found[name] = _resolved(name, root)
            open.append(found[name])
        open += [inner for _, _, inner in inner_of(node)]
    return found


def _resolved(name: str, root: Json) -> Json:
    """What a local reference names; True where it is none (the library says so)."""
    at = root
    for step in name.removeprefix("#").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if step and isinstance(at, dict):
            at = at.get(step, True)
    return at
