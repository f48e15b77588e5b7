"""The ops that verify drafts: which one serves, empty calls, where native rows start, refusals, caches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.errors import ArgumentError, ReplayError, SpecError
from replayssm_tune.runtime.spec import FAMILIES
from tests.runtime.calls import call, copied, random_call
from tests.runtime.drafts import agree, spec_of
from tests.runtime.small_calls import CONTRACTS, arguments, dispatched, named
from tests.runtime.small_calls import call as call_op


def value_of(given: dict[str, Any]) -> Tensor:
    """What outputs look like."""
    value: Tensor = given["v" if "q" in given else "x"]
    return value


@pytest.mark.parametrize("native", [False, True])
def test_which_operator_serves(family: str, native: bool) -> None:
    def operator(given: dict[str, Any]) -> str:
        with dispatched() as seen:
            call(given)
        (name,) = seen
        return name

    op = f"{family}_native_verify" if native else f"{family}_verify"
    for most in (1, 2):
        spec = spec_of(family, 4, most)
        for packed in (False, True):
            given = random_call(spec.native if native else spec, 3, 4, "cpu", packed=packed)
            assert operator(given) == (op if native or packed or most > 1 else f"{family}_step")


@pytest.mark.parametrize("op", ["verify", "native_verify"])
def test_nobody_there(family: str, op: str) -> None:
    """Without rows all tokens are nobody's; rows without tokens name no slot."""
    given = arguments(f"{family}_{op}")
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    out = torch.full_like(value_of(given), math.nan)
    nobody = {"slot_index": given["slot_index"][:0], "query_start": torch.zeros(1, dtype=torch.int32)}
    empty = {"query_start": torch.zeros(4, dtype=torch.int32)}
    empty["slot_index"] = torch.full_like(given["slot_index"], 2**30)
    if op == "native_verify":
        nobody["accepted"] = given["accepted"][:0]
        empty["accepted"] = torch.full_like(given["accepted"], 99)
    for changes in (nobody, empty):
        y = call_op(f"{family}_{op}", given | changes | {"out": out.fill_(math.nan)})
        assert not y.any()
    packed = {a.name for a in CONTRACTS[f"{family}_{op}"].arguments if a.dims[0] == "tokens"}
    none = {name: value[:0] for name, value in given.items() if name in packed}
    for changes in (nobody, empty):
        assert call_op(f"{family}_{op}", given | none | changes).shape == (0, 4, 8)
    assert all(torch.equal(given[name], value) for name, value in before.items())


def test_the_native_op_starts_from_what_was_kept(family: str) -> None:
    """Whatever slot that is in, one that it writes over too; others of the row are not read."""
    op = f"{family}_native_verify"
    for kept in (1, 2, 3):
        given = arguments(op)
        given["query_start"] = torch.tensor([0, 3, 3, 3]).int()
        given["slot_index"] = torch.tensor([[4, 1, 3], [-1, 0, 0], [2**30] * 3]).int()
        given["accepted"] = torch.tensor([kept, 0, 0]).int()
        source = int(given["slot_index"][0, kept - 1])
        others = [slot for slot in range(6) if slot != source]
        step = copied(given)
        given["state"][others] = math.nan
        y = call_op(op, given)
        names = {a.name for a in CONTRACTS[op].arguments if a.dims[0] == "tokens"}
        for i in range(3):
            one = {n: v[i : i + 1] if n in names else v for n, v in step.items()}
            one = {n: v for n, v in one.items() if n not in ("accepted", "query_start")}
            one["slot_index"] = torch.tensor([source]).int()
            agree(y[i : i + 1], call_op(f"{family}_native_step", one).double())
            agree(given["state"][given["slot_index"][0, i]], step["state"][source].double())
        assert given["state"][[0, 2, 5]].isnan().all()


def test_a_query_start_is_told_apart(family: str) -> None:
    """A call without one must not be taken for one like it that has one, nor the other way round."""
    for op in ("verify", "native_verify"):
        given = arguments(f"{family}_{op}")
        wide = {
            name: torch.cat([value, value])
            for name, value in given.items()
            if name in {a.name for a in CONTRACTS[f"{family}_{op}"].arguments if a.dims[0] == "tokens"}
        }
        for _ in range(2):
            full = arguments(f"{family}_{op}") | wide | {"query_start": None}
            assert call_op(f"{family}_{op}", full).all(-1).all()
            some = arguments(f"{family}_{op}") | wide
            assert not call_op(f"{family}_{op}", some)[3:].any()


@pytest.mark.parametrize("odd", [1.0, True, torch.tensor(1)], ids=["float", "bool", "tensor"])
def test_what_equals_one_but_is_no_whole_number_is_refused(family: str, odd: object) -> None:
    with pytest.raises(ArgumentError, match=r"num_tokens is .*; expected a whole number"):
        call_op(f"{family}_step", arguments(f"{family}_step", num_tokens=odd))


Bad = tuple[dict[str, Any], type[ReplayError], str]
BAD_NUMBERS: list[Bad] = [
    ({"num_tokens": 0}, SpecError, "-1 drafts make 0 tokens a row, verify takes 1 to 16"),
    ({"num_tokens": 17, "window": 20}, SpecError, "16 drafts make 17 tokens a row, verify takes 1 to 16"),
    ({"num_tokens": 5}, SpecError, "4 drafts make 5 tokens a step, beyond the window of 4"),
    ({"num_tokens": 3}, ArgumentError, r"room for 6 tokens .* needs window \+ 3 = 7"),
    *(({"num_tokens": odd}, ArgumentError, "num_tokens is .*; expected a whole number")
      for odd in (2.0, "2", None, True)),
]  # fmt: skip
BAD_STARTS: list[Bad] = [
    ({"query_start": None}, ArgumentError, "[xv] has 3 tokens .*expected 3 rows of 2, 6; pass query_start"),
    ({"query_start": torch.zeros(4).long()}, ArgumentError, "query_start is i64; expected i32"),
    ({"query_start": torch.zeros(3).int()}, ArgumentError, r"query_start has shape \(3,\); expected \(4,\)"),
    ({"query_start": torch.tensor([0, 3, 3, 3]).int()}, ArgumentError, "row 0 is given 3 tokens"),
    ({"query_start": torch.tensor([0, 2, 1, 3]).int()}, ArgumentError, "row 1 is given -1 tokens"),
    ({"query_start": torch.tensor([1, 2, 2, 3]).int()}, ArgumentError, "begins at 1 and ends at 3"),
    ({"query_start": torch.tensor([0, 2, 3, 5]).int()}, ArgumentError, "0 and ends at 5, of 3 tokens"),
]
# Rows of two tokens, of none and of one.
BAD_SLOTS: list[Bad] = [
    ({"slot_index": torch.arange(3)}, ArgumentError, r"slot_index has .* 2 dimension.*rows, num_tokens"),
    ({"slot_index": torch.zeros(3, 0).int()}, SpecError, "0 tokens a row, native_verify takes 1 to 16"),
    ({"slot_index": torch.zeros(3, 17).int()}, SpecError, "17 tokens a row, native_verify takes 1 to 16"),
    ({"slot_index": torch.tensor([[6, 0]] * 3)}, ArgumentError, "row 0 names slot 6, but there are 6 slots"),
    (
        {"slot_index": torch.tensor([[4, 6], [9, 9], [1, 0]]), "accepted": torch.ones(3).int()},
        ArgumentError,
        "row 0 writes the state after its token 1 to slot 6, but there are 6 slots",
    ),
    (
        {"slot_index": torch.tensor([[4, 2], [9, 9], [1, -1]]), "accepted": torch.tensor([1, 9, 2])},
        ArgumentError,
        "row 2 starts from slot -1, but there are 6 slots",
    ),
    (
        {"slot_index": torch.tensor([[4, 3], [9, 9], [1, 0]]), "null_slot": 3},
        ArgumentError,
        "row 0 (starts from|writes .* to) slot 3, .* none of them null_slot",
    ),
    ({"accepted": torch.ones(2).int()}, ArgumentError, r"accepted has shape \(2,\); expected \(3,\)"),
    ({"accepted": torch.ones(3)}, ArgumentError, "accepted is fp32; expected i32 or i64"),
    ({"accepted": None}, ArgumentError, "accepted is None; expected a tensor"),
    *(({"accepted": torch.tensor([1, 7, odd])}, ArgumentError,
       f"row 2 has accepted {odd} tokens, outside of 1 to 2") for odd in (0, 3, -1)),
]  # fmt: skip
REFUSED = [
    *((f"{family}_verify", bad) for family in FAMILIES for bad in BAD_NUMBERS + BAD_STARTS),
    *((f"{family}_native_verify", bad) for family in FAMILIES for bad in BAD_SLOTS + BAD_STARTS),
]


@pytest.mark.parametrize(("op", "bad"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_refused_writes_nothing(op: str, bad: Bad) -> None:
    changes, error, message = bad
    given = arguments(op)
    given["out"] = torch.full_like(value_of(given), 7.0)
    if "ring_len" in given:
        given["ring_len"].fill_(4)  # flushes
    before = copied(given)
    with pytest.raises(error, match=message):
        call_op(op, given | changes)
    assert all(torch.equal(given[name], v) for name, v in before.items() if isinstance(v, Tensor))
    assert not (call_op(op, given) == 7.0).any()


@pytest.mark.parametrize(("start", "length"), [(-1, 0), (6, 0), (0, -1), (0, 5)])
def test_cursors_out_of_range_are_refused(family: str, start: int, length: int) -> None:
    """Of rows with tokens; the ring of an empty row is not looked at."""
    given = arguments(f"{family}_verify")
    slots = given["slot_index"].tolist()
    given["ring_start"][slots[1]] = 99
    before = copied(given)
    given["ring_start"][slots[2]], given["ring_len"][slots[2]] = start, length
    with pytest.raises(ArgumentError, match=rf"row 2: .* ring_start {start} and ring_len {length},"):
        call_op(f"{family}_verify", given)
    caches = ("state", *(named(f"{family}_verify", ring) for ring in ("ring_x", "ring_b", "ring_decay")))
    assert all(torch.equal(given[name], before[name]) for name in caches)
    assert call_op(f"{family}_verify", before).isfinite().all()


def test_caches_have_room_for_drafts(family: str) -> None:
    spec = spec_of(family, 16, 4)
    cache = ops.make_cache(spec, 3, 4, 2, "cpu")
    assert cache.capacity == ops.ring_capacity(spec) == 20
    assert ops.ring_capacity(spec, conv_width=4) == 23
    parts = (cache.state, cache.ring_x, cache.ring_b, cache.ring_decay)
    assert sum(part.numel() * part.element_size() for part in parts) == 3 * ops.bytes_per_slot(spec, 4, 2)
    assert ops.make_cache(spec.native, 3, 4, 2, "cpu").capacity == 0
    assert ops.bytes_per_slot(spec.native, 4, 2) == 4 * 8 * 16 * 4
    with pytest.raises(ArgumentError, match="capacity 19 is too small for window 16: rings need at least 20"):
        ops.make_cache(spec, 3, 4, 2, "cpu", capacity=19)
    # What folds a ring does not depend on how it was filled.
    assert spec.materialize == spec_of(family, 16, 1).materialize
