"""A slot that two live rows of a call name: refused on a CPU by every op it harms, and nothing is written."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ArgumentError, conv_seed, conv_step, ops
from replayssm_tune.runtime.compat import flashinfer, vllm
from tests.runtime import small_calls
from tests.runtime.compat_scenes import UNTOUCHED
from tests.runtime.flashinfer_scenes import Checkpointing, Layers
from tests.runtime.small_calls import WINDOW, arguments, call, output_like
from tests.runtime.vllm_decoding import GdnDecoding, Refusal
from tests.runtime.vllm_drafts import Drafting, GdnDrafting, Mamba2Drafting

op = small_calls.op

I32 = torch.int32
index_dtypes = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)


def copied(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}


def unchanged(given: dict[str, Any], before: dict[str, Tensor]) -> bool:
    return all(torch.equal(given[name], value) for name, value in before.items())


def full_rings(op: str, slots: list[Any], index_dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """A call all of whose live rows flush, and whose outputs lie in memory of sevens."""
    given = arguments(op, slot_index=torch.tensor(slots, dtype=index_dtype))
    if "ring_len" in given:
        given["ring_len"].fill_(WINDOW)
    return given | {"out": torch.full_like(output_like(op, given), 7.0)}


@index_dtypes
@pytest.mark.parametrize("mode", [nullcontext(), torch.device("cpu")], ids=["direct", "dispatcher"])
def test_ops_refuse_a_slot_of_two_rows(op: str, index_dtype: torch.dtype, mode: Any) -> None:
    """Of several tokens a row, row 1 has none: it is padding, and counts for nothing."""
    slots: list[Any] = [5, 2, 5]
    if "verify" in op:
        slots = [[5, 0], [5, 0], [5, 1]] if "native" in op else [5, 5, 5]
    given = full_rings(op, slots, index_dtype)
    before = copied(given)
    with mode, pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 5; correct slot_index"):
        call(op, given)
    assert unchanged(given, before)


def test_padding_may_name_a_slot_as_often_as_it_likes(op: str) -> None:
    native_verify = "native_verify" in op
    for padding, null in ((-1, None), (4, 4)):
        slots: list[Any] = [padding, padding, 5]
        if native_verify:
            slots = [[padding, padding], [padding, 5], [5, 5]]  # row 2 has one token and kept one
        given = full_rings(op, slots) | {"null_slot": null}
        if native_verify:
            given["accepted"].fill_(1)
        y = call(op, given)
        last = len(y) - 1
        assert not bool(y[:last].any())
        assert bool(y[last].all())


ONE_EACH = "slot_index names slot {} twice: for token {} of row {} and for token {} of row {}"


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize(
    ("slots", "accepted", "found"),
    [
        ([[4, 1], [9, 9], [5, 0]], [2, 9, 2], None),
        # What a row writes after a token, another one's first, and its own.
        ([[4, 5], [9, 9], [5, 0]], [1, 9, 1], (5, 1, 0, 0, 2)),
        ([[4, 4], [9, 9], [5, 0]], [1, 9, 1], (4, 0, 0, 1, 0)),
        # The slot that a row of one token starts from: another one's, and its own.
        ([[4, 1], [9, 9], [5, 1]], [1, 9, 2], (1, 1, 0, 1, 2)),
        ([[4, 1], [9, 9], [5, 5]], [1, 9, 2], (5, 0, 2, 1, 2)),
        # Neither started from nor written, and of a row without tokens.
        ([[4, 1], [9, 9], [5, 1]], [1, 9, 1], None),
        ([[4, 1], [4, 1], [5, 0]], [1, 1, 1], None),
    ],
)
def test_every_token_of_a_native_verification_has_its_own_slot(
    family: str, slots: list[list[int]], accepted: list[int], found: tuple[int, ...] | None
) -> None:
    """Rows of two tokens, of none and of one."""
    op = f"{family}_native_verify"
    given = full_rings(op, slots) | {"accepted": torch.tensor(accepted)}
    before = copied(given)
    if found is None:
        assert bool(call(op, given).all())
        return
    with pytest.raises(ArgumentError, match=ONE_EACH.format(*found)) as refused:
        call(op, given)
    assert "every token whose state is written, or started from, has its own slot" in refused.value.hint
    assert unchanged(given, before)


@index_dtypes
def test_convolutions_refuse_a_slot_of_two_rows(index_dtype: torch.dtype) -> None:
    slots = torch.tensor([3, -1, 3, 0], dtype=index_dtype)
    given: dict[str, Any] = {
        "ring": torch.ones(6, 8, 8), "ring_start": torch.zeros(6, dtype=I32),
        "ring_len": torch.zeros(6, dtype=I32),
    }  # fmt: skip
    step = given | {"window": 4, "slot_index": slots, "out": torch.full((4, 8), 7.0)}
    seed = {name: given[name] for name in ("ring", "ring_start")} | {"slots": slots}
    before = copied(step)
    with pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 3; correct slot_index"):
        conv_step(torch.ones(4, 8), torch.ones(8, 4), **step)
    with pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 3; correct slots"):
        conv_seed(torch.zeros(4, 3, 8), **seed)
    assert unchanged(step, before)
    # A row without tokens is padding.
    starts = torch.tensor([0, 1, 2, 2, 3], dtype=I32)
    assert bool(
        conv_step(torch.ones(3, 8), torch.ones(8, 4), **step | {"out": None, "query_start": starts})[0].all()
    )


@index_dtypes
def test_cursors_move_once_or_not_at_all(index_dtype: torch.dtype) -> None:
    start, length = torch.tensor([[1, 2, 3, 4], [4, 0, 2, 3]], dtype=I32)
    slots = torch.tensor([2, -1, 2, 0], dtype=index_dtype)
    cursors: dict[str, Any] = {"ring_start": start, "ring_len": length}
    commit = cursors | {"slot_index": slots, "window": 4, "num_tokens": 2, "capacity": 6}
    before = copied(cursors)
    with pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 2; correct slot_index"):
        ops.commit(torch.ones_like(slots), **commit)
    with pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 2; correct slots"):
        ops.drained(slots, **cursors, capacity=6)
    assert unchanged(cursors, before)
    ops.reset(slots, **cursors)
    assert (start.tolist(), length.tolist()) == ([0, 2, 0, 4], [0, 0, 0, 3])
    # Of a packed batch a row without tokens is padding.
    ops.commit(torch.ones_like(slots), **commit, query_start=torch.tensor([0, 2, 4, 4, 5], dtype=I32))
    assert length.tolist() == [1, 0, 1, 3]


# ---- adapters: calls of several ops see to it before the first of them ----


@pytest.mark.parametrize("flush", [[0, 0], [1, 0], [0, 1], [1, 1]], ids=str)
@pytest.mark.parametrize(("slots", "found"), [
    ([2, 2], "rows 0 and 1 name the same slot, 2"), ([1, 7], "row 1 names slot 7, but there are 7 slots"),
])  # fmt: skip
def test_mamba2_of_vllm(flush: list[int], slots: list[int], found: str) -> None:
    scene = Refusal()
    caches = [pool.copied().memory for pool in (scene.decoding.state, scene.decoding.x)]
    with pytest.raises(ArgumentError, match=found):
        scene.call(is_flush=torch.tensor(flush), state_batch_indices=torch.tensor(slots))
    kept = (scene.decoding.state.memory, scene.decoding.x.memory)
    assert all(
        torch.equal(*pair)
        for pair in zip(map(torch.nan_to_num, kept), map(torch.nan_to_num, caches), strict=True)
    )
    scene.call(is_flush=torch.tensor([1, 1]), state_batch_indices=torch.tensor([0, 0]))


@pytest.mark.parametrize("filled", [[0, 0], [3, 0], [0, 3], [3, 3]], ids=str)
def test_gdn_of_vllm(filled: list[int]) -> None:
    scene = GdnDecoding(4)
    state = scene.state.copied().memory
    with pytest.raises(ArgumentError, match="rows 0 and 1 name the same slot, 5"):
        vllm.fused_recurrent_gated_delta_rule_replayssm(
            torch.ones(2, 96), torch.ones(2, 4), torch.ones(2, 4), scene.A_log, scene.bias, 0.25,
            scene.state.view, scene.d.view, scene.k.view, scene.gates.view, torch.empty(2, 4, 8),
            torch.tensor([5, 5]), torch.tensor(filled),
        )  # fmt: skip
    assert torch.equal(scene.state.memory.nan_to_num(), state.nan_to_num())
    scene.step([0, 0, -1, -1, 2])


def drafts(scene: Drafting, slots: list[int], counts: list[int]) -> Tensor:
    """A step of rows with so many tokens each; inputs of equal calls are equal."""
    scene.g.manual_seed(1)
    starts = torch.tensor([0, *counts]).cumsum(0)
    inputs = scene.inputs(int(starts[-1]))
    out = torch.empty(int(starts[-1]), *scene.first.shape[1:3])
    return scene.verify(inputs, out=out, indices=torch.tensor(slots), query_start_loc=starts, **scene.limits)


@pytest.mark.parametrize("drafting", [Mamba2Drafting, GdnDrafting])
def test_drafts_of_vllm(drafting: type[Drafting]) -> None:
    scene, alone = drafting(), drafting()
    before = {name: pool.copied() for name, pool in scene.pools.items()}
    with pytest.raises(ArgumentError, match="rows 0 and 2 name the same slot, 3"):
        drafts(scene, [3, 4, 3], [2, 1, 1])
    for name, pool in scene.pools.items():
        assert torch.equal(pool.memory.nan_to_num(), before[name].memory.nan_to_num())
    # A row without tokens leaves the slot to the one that has some, wherever it stands.
    for slots, counts in (([3, 3], [2, 0]), ([3, 3], [0, 2]), ([0, 3, 0], [1, 2, 1])):
        scene, alone = drafting(), drafting()
        y = drafts(scene, slots, counts)
        if len(slots) == 2:
            assert torch.equal(y, drafts(alone, [3], [2]))
            for name, pool in scene.pools.items():
                assert torch.equal(pool.memory.nan_to_num(), alone.pools[name].memory.nan_to_num())


def test_gdn_rows_without_tokens_fold_in_a_slot_of_their_own() -> None:
    scene = GdnDrafting()
    scene.write_pos[3], scene.is_flush[3] = 4, 1
    for name in ("d", "k", "g"):
        scene.pools[name].view[3] = 0.5
    state = scene.state.memory.clone()
    with pytest.raises(ArgumentError, match="rows 0 and 1 name the same slot, 3"):
        drafts(scene, [3, 3], [0, 2])
    assert torch.equal(scene.state.memory.nan_to_num(), state.nan_to_num())
    drafts(scene, [3, 4], [0, 2])
    assert not torch.equal(scene.state.memory.nan_to_num(), state.nan_to_num())


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_cursors_of_vllm(family: str) -> None:
    commits: dict[str, Any] = {"mamba2": vllm.commit_replayssm_spec, "gdn": vllm.commit_gdn_replayssm_spec}
    resets: dict[str, Any] = {
        "mamba2": vllm.reset_replayssm_spec_cursors, "gdn": vllm.reset_gdn_replayssm_spec_cursors,
    }  # fmt: skip
    cursors = {
        "write_pos": torch.full((6,), 5, dtype=I32), "start": torch.ones(6, dtype=I32),
        "is_flush": torch.zeros(6, dtype=torch.int8),
    }  # fmt: skip
    before, ones = copied(cursors), torch.ones(4, dtype=I32)
    with pytest.raises(ArgumentError, match="rows 1 and 3 name the same slot, 2"):
        commits[family](*cursors.values(), ones, torch.tensor([0, 2, 0, 2]), 12, 3)
    assert unchanged(cursors, before)
    commits[family](*cursors.values(), ones, torch.tensor([0, 2, 0, -1]), 12, 3)
    assert cursors["write_pos"].tolist() == [5, 5, 6, 5, 5, 5]
    resets[family](*cursors.values(), ones, torch.tensor([0, 2, 0, 2]), 12, 3)
    assert cursors["write_pos"].tolist() == [5, 5, 0, 5, 5, 5]
    with pytest.raises(ArgumentError, match="row 3 names slot 6, but there are 6 slots"):
        resets[family](*cursors.values(), ones, torch.tensor([0, 3, 0, 6]), 12, 3)
    assert cursors["write_pos"].tolist() == [5, 5, 0, 5, 5, 5]


@pytest.mark.parametrize("drafting", [Mamba2Drafting, GdnDrafting])
@pytest.mark.parametrize("kept", [[2, 0], [0, 2]], ids=str)
def test_commits_of_vllm_take_rows_that_a_step_takes(drafting: type[Drafting], kept: list[int]) -> None:
    """One of two rows has no tokens: it leaves the cursors of the slot to the other one."""
    scene, alone = drafting(), drafting()
    drafts(scene, [3, 3], kept)
    drafts(alone, [3], [2])
    for of, accepted in ((scene, kept), (alone, [2])):
        cursors = (of.write_pos, of.start, of.is_flush)
        indices = torch.tensor([3] * len(accepted))
        of.commit(*cursors, torch.tensor(accepted), indices, **of.limits, cache_buf_len=of.capacity)
    assert scene.write_pos.tolist() == alone.write_pos.tolist()
    assert int(scene.write_pos[3]) == 2
    assert scene.start.tolist() == alone.start.tolist()
    assert scene.is_flush.tolist() == alone.is_flush.tolist()


@pytest.mark.parametrize("counts", [None, [3, 1, 1], [1, 3, 1], [1, 1, 1]], ids=str)
def test_checkpointing_of_flashinfer(counts: list[int] | None) -> None:
    """Of rows that vary those of one token would flush by the ops' rule alone, in a call of their own."""
    scene, slots = Checkpointing(), torch.tensor([6, 6, 2])
    scene.length.fill_(4)
    for name in ("x", "B", "dt"):
        scene.pools[name].view.fill_(0.5)
    before = {name: pool.copied() for name, pool in scene.pools.items()}
    varying: dict[str, Any] = {}
    shape = (3, 3)
    if counts is not None:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        varying, shape = {"cu_seqlens": starts, "max_seqlen": 3}, (1, sum(counts))
    out = torch.full((*shape, *scene.pools["state"].view.shape[1:3]), UNTOUCHED)
    with pytest.raises(ArgumentError, match="rows 0 and 1 name the same slot, 6"):
        scene.call(out, scene.inputs(*shape), state_batch_indices=slots, **varying)
    assert bool((out == UNTOUCHED).all())
    for name, pool in scene.pools.items():
        assert torch.equal(pool.memory.nan_to_num(), before[name].memory.nan_to_num())
    scene.call(out, scene.inputs(*shape), state_batch_indices=slots, pad_slot_id=6, **varying)


def test_checkpointing_leaves_rows_without_tokens_out() -> None:
    scene = Checkpointing()
    starts = torch.tensor([0, 0, 2]).int()
    out = torch.full((1, 2, *scene.pools["state"].view.shape[1:3]), UNTOUCHED)
    indices = torch.tensor([6, 6])
    scene.call(out, scene.inputs(1, 2), state_batch_indices=indices, cu_seqlens=starts, max_seqlen=3)
    assert bool((out != UNTOUCHED).any(-1).all())
    assert flashinfer.checkpointing_ssu is Checkpointing.function


@pytest.mark.parametrize(
    ("last", "found"),
    [([3, 3], "row 1 writes slot 3, which another row reads or writes"), ([3, 1], "row 1 folds 2 of 3 ring")],
)
def test_materialize_of_flashinfer_looks_at_every_layer_first(last: list[int], found: str) -> None:
    layers = Layers()
    before = [pool.copied() for pool in layers.pools["state"]]
    with pytest.raises(ArgumentError, match=found):
        layers.call([[0, 1], [1, 1]], [[2, 3], last], [0, 0], [3, 2], [0, 1])
    for pool, kept in zip(layers.pools["state"], before, strict=True):
        assert torch.equal(pool.memory.nan_to_num(), kept.memory.nan_to_num())
