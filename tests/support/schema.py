"""JSON values against the part of JSON Schema that schemas here use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SAID = {"$schema", "$comment", "$defs", "title", "description"}
_KNOWN = _SAID | {"$ref", "type", "enum", "const", "anyOf", "pattern", "minimum", "maximum"}
_KNOWN |= {"minItems", "items", "properties", "required", "additionalProperties"}


def read_schema(path: Path) -> dict[str, Any]:
    """Read a schema."""
    schema: dict[str, Any] = json.loads(path.read_text())
    return schema


def faults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a value is not as a schema has it; "$ref" is to the root's definitions.

    A keyword that is not known is an error: it would not be checked.
    """
    return _faults(value, schema, root, "")


def _faults(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    assert schema.keys() <= _KNOWN, f"{at}: keywords {sorted(schema.keys() - _KNOWN)}"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from _faults(value, root["$defs"][name], root, at)
    kinds = schema.get("type", [*_TYPES])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_of(value, kind) for kind in kinds):
        yield f"{at}: {value!r} is none of {kinds}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if value != schema.get("const", value):
        yield f"{at}: {value!r} is not {schema['const']!r}"
    ways = [list(_faults(value, each, root, at)) for each in schema.get("anyOf", [])]
    if ways and all(ways):
        yield f"{at}: {value!r} is of no kind"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, int | float) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        yield f"{at}: {value!r} is beyond its limits"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{at}: {len(value)} items"
        for number, item in enumerate(value):
            yield from _faults(item, schema.get("items", {}), root, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from _faults_of_object(value, schema, root, at)


def _faults_of_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}: {name} is missing"
    for name, item in value.items():
        if name not in known and others is False:
            yield f"{at}: {name} is not known"
        else:
            yield from _faults(item, known.get(name, others), root, f"{at}.{name}")


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
