"""Tiles of the convolution: the space, the rule, keys, rows in tables, and who serves a call."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import conv, conv_launch
from replayssm_tune.runtime.contracts import CONV_STEP
from replayssm_tune.runtime.conv_lookup import find_tile
from replayssm_tune.runtime.conv_tiles import (
    ConvRow,
    ConvSpec,
    ConvTile,
    default_tile,
    effective_batch,
    tiles,
)
from replayssm_tune.runtime.errors import SpecError, TableError
from replayssm_tune.runtime.lookup import Lookup
from replayssm_tune.runtime.merge import merge
from replayssm_tune.runtime.table import Table, dumps, loads
from tests.runtime import table_samples as samples
from tests.runtime.table_samples import CONV as SPEC
from tests.runtime.table_samples import conv_row as row
from tests.runtime.test_schema import VALIDATOR

TOKEN_BLOCKS = (1, 2, 4, 8, 16, 32, 64)


def table(*rows: ConvRow, gpu: Any = samples.H200, **changes: Any) -> Table:
    return samples.table(samples.row(), gpu=gpu, convolutions=rows, **changes)


# ---- the space, the rule, the key ----


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_the_space_is_small_and_of_tiles_that_fit_in_registers(token_block: int) -> None:
    space = tiles(token_block)
    assert 8 <= len(space) <= 18
    assert len(set(space)) == len(space)
    for tile in space:
        assert tile.block & (tile.block - 1) == 0
        least = 4 if tile.num_warps > 1 else 1
        assert least <= tile.block * token_block / (32 * tile.num_warps) <= 32


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_the_rule_is_a_point_of_the_space_and_grows_with_the_batch(token_block: int) -> None:
    found = [default_tile(batch, token_block) for batch in (1, 1023, 1024, 4095, 4096, 10**6)]
    assert set(found) <= set(tiles(token_block))
    assert found == sorted(found)
    assert [tile.num_warps for tile in found] == [1, 1, 2, 2, 4, 4]


def test_the_rule_gives_many_programs_of_few_values_at_small_batches() -> None:
    assert [default_tile(batch, 1).key for batch in (1, 1024, 4096)] == ["b128.w1", "b256.w2", "b512.w4"]
    small = [default_tile(1, tokens).key for tokens in (2, 4, 8, 64)]
    assert small == ["b64.w1", "b32.w1", "b16.w1", "b16.w1"]
    assert default_tile(4096, 16) == ConvTile(128, 4)
    assert (effective_batch(3, 128), effective_batch(3, 129)) == (3, 6)


def test_keys_are_read_back_and_tell_every_field() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"width": 3}, {"num_tokens": 5}, {"ring_dtype": "fp32"}, {"weight_dtype": "fp32"},
        {"activation_dtype": "fp16", "ring_dtype": "fp16", "weight_dtype": "fp16"},
    ]  # fmt: skip
    specs = [dataclasses.replace(SPEC, **change) for change in changes]
    assert len({spec.key for spec in specs}) == len(specs)
    assert [ConvSpec.parse(spec.key) for spec in specs] == specs
    assert dataclasses.replace(SPEC, num_tokens=5).token_block == 8


@pytest.mark.parametrize(
    "key",
    [
        "conv-w4-t1-bf16-bf16",
        "conv-w5-t1-bf16-bf16-bf16",
        "conv-w4-t65-bf16-bf16-bf16",
        "conv-w4-t1-bf16-fp16-bf16",
        "mamba2-step",
        "",
    ],
)
def test_no_key_is_refused(key: str) -> None:
    with pytest.raises(SpecError):
        ConvSpec.parse(key)


# ---- rows in tables ----


def test_tables_with_tiles_are_read_back_sorted_and_validate() -> None:
    drafts = dataclasses.replace(SPEC, num_tokens=4)
    rows = [row(64), row(2), row(8, spec=drafts)]
    given = table(*rows)
    text = dumps(given)
    assert loads(text) == given == table(*reversed(rows))
    assert dumps(loads(text)) == text
    assert [r.effective_batch for r in given.convolutions] == [16, 512, 64]
    VALIDATOR.validate(json.loads(text))


def test_a_table_without_tiles_is_as_it_was_and_still_read() -> None:
    text = dumps(table())
    assert "convolutions" not in text
    assert loads(text).convolutions == ()


def test_a_changed_tile_is_a_line_of_diff() -> None:
    before, after = (dumps(table(row(2), row(64, block))).splitlines() for block in (512, 1024))
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


REFUSED: dict[str, tuple[Any, str]] = {
    "another schema": (lambda d, c: d.update(schema_version=2), "schema_version 2 is not known"),
    "no list": (lambda d, c: d.update(convolutions={}), "convolutions: expected a list"),
    "unknown field": (lambda d, c: c.update(speed=1), r"convolutions\[0\]: unknown field 'speed'"),
    "missing field": (lambda d, c: c.pop("tile"), r"convolutions\[0\]: field 'tile' is missing"),
    "block": (lambda d, c: c["tile"].update(block=100), "block 100 is not a power of two"),
    "width": (lambda d, c: c["spec"].update(width=7), "width 7"),
    "time": (lambda d, c: c.update(time_us=0.0), r"time_us 0\.0 is not a positive number"),
    "samples": (lambda d, c: c.update(samples_us=[]), "samples_us is empty"),
    "rows": (lambda d, c: c.update(rows=0), "rows 0"),
    "provenance": (lambda d, c: c.update(triton=""), "triton is empty"),
    "twice": (lambda d, c: d["convolutions"].append(c), "two rows for conv-w4-t1-bf16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tile_is_refused(name: str) -> None:
    change, message = REFUSED[name]
    document = json.loads(dumps(table(row())))
    change(document, document["convolutions"][0])
    with pytest.raises(TableError, match=message):
        loads(json.dumps(document))


def test_a_static_table_has_no_tiles() -> None:
    with pytest.raises(TableError, match="a static table holds measured rows"):
        samples.table(samples.static_row(), convolutions=(row(),))


def test_of_two_tables_the_later_tile_counts_and_no_other_is_lost() -> None:
    merged = merge([table(row(2, 128), row(64, 256)), table(row(64, 512))])
    assert [(r.rows, r.tile.block) for r in merged.convolutions] == [(2, 128), (64, 512)]
    static = samples.table(samples.static_row(8192))
    assert merge([merged, static]).convolutions == merged.convolutions


# ---- the look-up ----


def found(lookup: Lookup, rows: int, spec: ConvSpec = SPEC, gpu: Any = samples.H200) -> tuple[str, str]:
    hit = find_tile(lookup, spec, effective_batch(rows, 1000), gpu)
    assert (hit.row is None) == (hit.step == "default")
    return hit.tile.key, hit.step


def test_the_nearest_row_serves_and_beyond_its_reach_the_rule() -> None:
    lookup = Lookup([table(row(4, 64), row(64, 1024))])
    assert found(lookup, 4) == found(lookup, 5) == found(lookup, 1) == ("b64.w4", "measured")
    assert found(lookup, 60) == found(lookup, 250) == ("b1024.w4", "measured")
    assert found(lookup, 257) == ("b256.w2", "default")
    assert find_tile(lookup, SPEC, 7, samples.H200).step == "default"
    reason = find_tile(lookup, SPEC, 500, samples.H200).reason
    assert reason == f"{SPEC.key}: measured on H200; nearest effective batch 512 to 500"
    assert "tile by rule" in find_tile(lookup, SPEC, 7, samples.H200).reason
    # From where a GPU is full on the last row serves without end.
    assert found(Lookup([table(row(512, 1024))]), 10**6) == ("b1024.w4", "measured")


def test_nothing_is_taken_from_another_convolution() -> None:
    lookup = Lookup([table(row())])
    for change in ({"width": 3}, {"num_tokens": 2}, {"weight_dtype": "fp32"}, {"ring_dtype": "fp32"}):
        other = dataclasses.replace(SPEC, **change)
        assert found(lookup, 64, other) == (default_tile(512, other.token_block).key, "default")


def test_whose_rows_come_first() -> None:
    own, shipped = table(row(64, 256)), table(row(64, 512))
    h100, a100, h20 = (table(row(64, 1024), gpu=gpu) for gpu in (samples.H100, samples.A100, samples.H20))
    assert found(Lookup([shipped], [own]), 64) == ("b256.w4", "user")
    assert found(Lookup([h100, shipped]), 64) == ("b512.w4", "measured")
    assert found(Lookup([h20, h100]), 64) == ("b1024.w4", "sister")
    assert found(Lookup([h20, a100]), 64) == ("b1024.w4", "architecture")
    assert found(Lookup([a100]), 64) == ("b128.w1", "default")
    # A table of the user's that does not reach leaves the call to the next one.
    assert found(Lookup([shipped], [table(row(1, 64))]), 64) == ("b512.w4", "measured")


def test_a_row_whose_kernel_has_changed_serves_and_says_so() -> None:
    hit = find_tile(Lookup([table(row())]), SPEC, 512, samples.H200, lambda row: True)
    assert (hit.step, hit.reason.rpartition("; ")[2]) == ("measured", "stale: its kernel has changed since")


@pytest.mark.parametrize("packed", [False, True])
def test_calls_are_served_by_the_tables_rows(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tensors of a call to the constants its kernel is compiled for, without a GPU."""
    spec, tile = ConvSpec(3, 2, "fp16", "fp32", "fp16"), ConvTile(128, 8)
    cursor = torch.zeros(16, dtype=torch.int32)
    x = torch.zeros(32, 1000, dtype=torch.float16)
    tensors = (
        x, torch.zeros(1000, 3, dtype=torch.float16), None, torch.zeros(16, 8, 1000), cursor, cursor,
        torch.arange(16), torch.arange(17, dtype=torch.int32) * 2 if packed else None, torch.empty_like(x),
    )  # fmt: skip
    signature = conv.check_conv_step(CONV_STEP, tensors, (3, 2, True))
    monkeypatch.setattr(conv_launch, "gpu_info", lambda index: samples.H200)
    served_by = {tile: Lookup([table(row(16, 128, spec, tile=tile))]), default_tile(128, 2): Lookup([])}
    for served, lookup in served_by.items():
        monkeypatch.setattr(conv_launch, "default_lookup", lambda lookup=lookup: lookup)
        conv_launch.tile_for.cache_clear()
        launcher: Any = conv_launch.prepare(signature, -1)
        assert (launcher.choice.constants[-1], launcher.choice.warps) == dataclasses.astuple(served)
    conv_launch.tile_for.cache_clear()


def test_a_row_without_a_date_or_a_reason_is_refused() -> None:
    with pytest.raises(TableError, match="not an ISO date"):
        row(1, 128, date="yesterday")
    with pytest.raises(TableError, match="verdict is empty"):
        row(1, 128, verdict="")


@pytest.mark.parametrize(
    "key", ["conv-w04-t1-bf16-bf16-bf16", "conv-w4-t01-bf16-bf16-bf16", "conv-w٤-t1-bf16-bf16-bf16"]
)
def test_a_key_is_written_one_way(key: str) -> None:
    with pytest.raises(SpecError):
        ConvSpec.parse(key)
    with pytest.raises(SpecError):
        ConvSpec(4, True, "bf16", "bf16", "bf16")


def test_two_tiles_for_one_batch_are_named() -> None:
    with pytest.raises(TableError, match=r"two rows for conv-w4-t1-bf16-bf16-bf16 at effective batch 16"):
        table(row(2, 128), row(2, 256))
