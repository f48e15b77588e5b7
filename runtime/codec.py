"""Records to JSON and back: named fields, nothing unknown, nothing converted."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from .errors import SpecError, TableError
from .spec import Spec


def encode(value: Any) -> Any:
    """Dictionaries, lists and scalars of a record."""
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def json_text(value: object) -> str:
    """JSON of ``value`` in one line, keys sorted."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)


@functools.cache
def field_types(record: type) -> dict[str, Any]:
    """Types of a record's fields, resolved."""
    hints = typing.get_type_hints(record)
    return {f.name: hints[f.name] for f in dataclasses.fields(record)}


@functools.cache
def required_fields(record: type) -> frozenset[str]:
    """Fields that a document must have.

    An axis added to a structure or tile later has a default that means "without it", so older
    documents stay readable. A spec is a key: there nothing may be left out.
    """
    return frozenset(
        f.name for f in dataclasses.fields(record) if record is Spec or f.default is dataclasses.MISSING
    )


def decode(kind: Any, value: Any, where: str, **given: Callable[[], Any]) -> Any:
    """``value`` of a JSON document as ``kind``: a record, tuple, optional or scalar.

    Args:
        kind: Type to make.
        value: What the document has.
        where: Place in the document, for messages; may be empty.
        given: Fields of a record that are computed instead of read.

    Raises:
        TableError: A field is missing, unknown or of another type, or the record refuses its values.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        _require(isinstance(value, dict), where, f"expected an object, not {value!r}")
        return _decode_record(kind, value, where, given)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else decode(arguments[0], value, where)
    if origin is tuple:
        _require(isinstance(value, list), where, f"expected a list, not {value!r}")
        if arguments[-1] is Ellipsis:
            return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        _require(len(value) == len(arguments), where, f"expected {len(arguments)} values, not {value!r}")
        return tuple(decode(a, item, where) for a, item in zip(arguments, value, strict=True))
    accepted = (int, float) if kind is float else (kind,)
    # In Python a bool is an int; in a table it is a mistake.
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    _require(fits, where, f"expected {kind.__name__}, not {value!r}")
    if kind is not float:
        return value
    try:
        return float(value)
    except OverflowError as error:
        raise TableError(_place(where, "the number is beyond the range of a float")) from error


def _decode_record(
    record: type, value: dict[str, Any], where: str, given: dict[str, Callable[[], Any]]
) -> Any:
    kinds = {name: kind for name, kind in field_types(record).items() if name not in given}
    for name in value:
        _require(name in kinds, where, f"unknown field '{name}'")
    for name in kinds:
        _require(name in value or name not in required_fields(record), where, f"field '{name}' is missing")
    fields = {name: decode(kinds[name], item, _place(where, name)) for name, item in value.items()}
    try:
        return record(**fields, **{name: compute() for name, compute in given.items()})
    except (TableError, SpecError) as error:
        raise TableError(_place(where, str(error))) from error


def _place(where: str, what: str) -> str:
    return f"{where}: {what}" if where else what


def _require(condition: bool, where: str, message: str) -> None:
    if not condition:
        raise TableError(_place(where, message))
