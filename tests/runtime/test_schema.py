"""The published JSON Schema is the records', accepts tables and refuses what loading refuses."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings

from replayssm_tune.runtime.lookup import shipped_tables
from replayssm_tune.runtime.schema import table_schema, text
from replayssm_tune.runtime.table import dumps
from tests.paths import ROOT
from tests.runtime.table_samples import row, table, tables

PUBLISHED = ROOT / "docs" / "table.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(PUBLISHED.read_text(encoding="utf-8")))


def test_the_published_schema_is_up_to_date_and_valid():
    assert PUBLISHED.read_text(encoding="utf-8") == text(), (
        "docs/table.schema.json is old: python -m replayssm_tune.runtime.schema > docs/table.schema.json"
    )
    jsonschema.Draft202012Validator.check_schema(table_schema())


@settings(max_examples=20, deadline=None)
@given(tables())
def test_tables_validate(any_table):
    VALIDATOR.validate(json.loads(dumps(any_table)))


def test_shipped_tables_validate():
    for shipped in shipped_tables(strict=True):
        VALIDATOR.validate(json.loads(dumps(shipped)))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema_version=2),
        lambda d: d.pop("gpu"),
        lambda d: d["gpu"].update(capability=[9]),
        lambda d: d.update(extra=1),
        lambda d: d["rows"][0].update(source="guessed"),
        lambda d: d["rows"][0].update(plan=[]),
        lambda d: d["rows"][0].pop("launches"),
        lambda d: d["rows"][0]["spec"].update(state_dtype="int8"),
        lambda d: d["rows"][0]["launches"][0]["tile"].update(block_p="16"),
    ],
)
def test_malformed_tables_do_not_validate(change):
    document = json.loads(dumps(table(row())))
    change(document)
    assert not VALIDATOR.is_valid(document)


def test_fields_are_described():
    row_fields = table_schema()["properties"]["rows"]["items"]["properties"]
    assert "staggered mix" in row_fields["time_us"]["description"]
    assert row_fields["source"]["enum"] == ["measured", "static", "transferred"]
