"""JSON Schema of a dispatch table, derived from the records of :mod:`.table`.

``python -m replayssm_tune.runtime.schema`` prints it; ``docs/table.schema.json`` is that text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from typing import Any

from .codec import field_types, required_fields
from .plan import STRUCTURE_VALUES
from .spec import DTYPE_BYTES, FAMILIES, OPS
from .table import SCHEMA_VERSION, SOURCES, SPLIT_FIELDS, Launch, Row, Table

_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number"}

_ENUMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Table", "source"): SOURCES[:2],
    ("Row", "source"): SOURCES,
    **{("ConvSpec", f"{name}_dtype"): tuple(DTYPE_BYTES) for name in ("activation", "ring", "weight")},
    ("Spec", "family"): FAMILIES,
    ("Spec", "op"): OPS,
    **{("Spec", f"{name}_dtype"): tuple(DTYPE_BYTES) for name in ("activation", "state", "ring")},
    **{("Structure", name): values for name, values in STRUCTURE_VALUES.items()},
}


def table_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a table file."""
    schema = _record(Table, {"schema_version": {"const": SCHEMA_VERSION}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "replayssm-tune dispatch table",
        **schema,
    }


def text() -> str:
    """The schema as it is published."""
    return json.dumps(table_schema(), indent=1, sort_keys=True) + "\n"


def _record(record: type, extra: dict[str, Any] | None = None, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    notes, required = _field_docs(record), required_fields(record)
    properties = dict(extra or {})
    for name, kind in field_types(record).items():
        if name in skip:
            continue
        properties[name] = _type(kind)
        if (record.__name__, name) in _ENUMS:
            properties[name]["enum"] = list(_ENUMS[record.__name__, name])
        if name in notes:
            properties[name]["description"] = notes[name]
    return {
        "type": "object",
        "description": (inspect.getdoc(record) or "").partition("\n\n")[0].replace("\n", " "),
        "properties": properties,
        "required": sorted(name for name in properties if name in required or name in (extra or {})),
        "additionalProperties": False,
    }


def _type(kind: Any) -> dict[str, Any]:
    if kind is Row:
        return _record(Row, {"launches": {**_type(tuple[Launch, ...]), "minItems": 1}}, SPLIT_FIELDS)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return {"anyOf": [_type(arguments[0]), {"type": "null"}]}
    if typing.get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": _type(arguments[0])}
        count = len(arguments)
        return {"type": "array", "items": _type(arguments[0]), "minItems": count, "maxItems": count}
    return {"type": _SCALARS[kind]}


def _field_docs(record: type) -> dict[str, str]:
    """The strings that follow a record's fields in its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(note.value.value.replace("``", "").split())
        for field, note in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }


if __name__ == "__main__":
    print(text(), end="")
