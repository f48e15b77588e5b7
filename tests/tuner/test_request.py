"""The claim about the GPU, the cells of a request, and budgets."""

import dataclasses
from typing import Any

import pytest

from replayssm_tune.codegen import targets
from replayssm_tune.runtime.errors import ReplayError
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner import models, request
from replayssm_tune.tuner.errors import GpuMismatchError, NoGpuError, UsageError
from replayssm_tune.tuner.models import Model
from replayssm_tune.tuner.request import Budget, resolve_target, resolve_work

H100 = targets.find("H100")
H200 = targets.find("H200")
NVL = targets.find("H100 NVL")


def as_driver_says(gpu, name):
    return dataclasses.replace(gpu, name=name)


def test_claimed_and_absent_is_static():
    target = resolve_target("h100", False, lambda: None)
    assert target.gpu == H100
    assert not target.measured
    assert "static" in target.note
    assert "no GPU here" in target.note


def test_claimed_and_present_is_measured():
    target = resolve_target("H200", False, lambda: as_driver_says(H200, "NVIDIA H200"))
    assert target.gpu == H200
    assert target.measured


def test_no_claim_takes_what_is_there():
    assert resolve_target(None, False, lambda: as_driver_says(H200, "NVIDIA H200")).gpu == H200


def test_another_gpu_present():
    with pytest.raises(GpuMismatchError, match=r"claims H100 SXM.*NVIDIA H200") as error:
        resolve_target("H100", False, lambda: as_driver_says(H200, "NVIDIA H200"))
    assert "--static" in error.value.hint


def test_another_gpu_can_be_forced_into_static_mode():
    target = resolve_target("H100", True, lambda: as_driver_says(H200, "NVIDIA H200"))
    assert (target.gpu, target.measured) == (H100, False)


def test_static_on_the_gpu_itself():
    target = resolve_target(None, True, lambda: as_driver_says(H200, "NVIDIA H200"))
    assert (target.gpu, target.measured) == (H200, False)


def test_a_family_name_covers_its_members_but_not_its_namesakes():
    target = resolve_target("H100", False, lambda: as_driver_says(NVL, "NVIDIA H100 NVL"))
    assert target.gpu == NVL
    assert target.measured
    gh200 = targets.find("GH200")
    with pytest.raises(GpuMismatchError):
        resolve_target("H200", False, lambda: as_driver_says(gh200, "NVIDIA GH200 480GB"))


def test_nothing_claimed_and_nothing_there():
    with pytest.raises(NoGpuError) as error:
        resolve_target(None, False, lambda: None)
    assert "--gpu H100" in error.value.hint


def test_unknown_name():
    with pytest.raises(UsageError, match="H1000") as error:
        resolve_target("H1000", False, lambda: None)
    assert error.value.where == "--gpu"
    assert "did you mean H100" in error.value.hint


def test_a_gpu_of_no_supported_capability():
    old = dataclasses.replace(H100, name="NVIDIA GeForce RTX 2080", capability=(7, 5), sm_count=46)
    with pytest.raises(UsageError, match=r"compute capability 7\.5"):
        resolve_target(None, False, lambda: old)


def test_an_unlisted_gpu_of_a_supported_capability_is_taken_as_its_driver_describes_it():
    slice_of = dataclasses.replace(H200, name="NVIDIA H200 MIG 3g.71gb", sm_count=60)
    target = resolve_target(None, False, lambda: slice_of)
    assert target.gpu == slice_of
    assert target.measured


def test_default_work_starts_with_one_sequence_of_the_most_split_layer():
    work, notes = resolve_work([models.find(name) for name in models.DEFAULT_MODELS], H200)
    assert not notes
    assert len(work) == 6
    assert {item.spec.state_dtype for item in work} == {"fp32", "bf16"}
    for item in work:
        heads = min(int(layer.rpartition("tp")[2]) for layer in item.layers)
        assert heads == 1
        assert item.effective_batches[0] <= 16
        # Whole groups of heads: 683 sequences of 96 heads for 65536.
        assert item.effective_batches[-1] == pytest.approx(request.MAX_EFFECTIVE_BATCH, rel=0.01)
        assert all(batch % item.spec.heads_per_group == 0 for batch in item.effective_batches)
        assert list(item.effective_batches) == sorted(set(item.effective_batches))


def test_usual_splits_that_a_model_cannot_have_are_left_out_but_asked_ones_are_refused():
    odd = Model("odd", 12, 64, 128, 4)
    work, _ = resolve_work([odd], H200)
    assert work[0].layers == ("odd tp1", "odd tp2", "odd tp4")
    with pytest.raises(ReplayError, match="12 heads are not divisible by 8"):
        resolve_work([odd], H200, tensor_parallel=(8,))


def test_notes_tell_of_replicated_groups():
    _, notes = resolve_work([models.find("falcon-h1-34b")], H200, tensor_parallel=(4,))
    assert len(notes) == 1
    assert "replicated" in notes[0]


def test_batches_are_sequences_on_one_gpu():
    work, _ = resolve_work(
        [models.find("nemotron-3-nano-4b")], H200,
        tensor_parallel=(1, 8), state_dtypes=("fp32",), batches=(1, 64),
    )  # fmt: skip
    assert [item.effective_batches for item in work] == [(12, 96, 768, 6144)]


def test_memory_bounds_the_grid_and_refuses_what_was_asked():
    small = dataclasses.replace(H100, memory_bytes=2 * 2**30)
    layer = models.find("nemotron-3-super-120b-a12b")
    work, _ = resolve_work([layer], small, state_dtypes=("fp32",))
    last = work[0].effective_batches[-1]
    assert last < request.MAX_EFFECTIVE_BATCH
    assert request.fits(work[0].spec, last, small.memory_bytes)
    with pytest.raises(UsageError, match="do not fit in the 2 GiB"):
        resolve_work([layer], small, tensor_parallel=(1,), batches=(512,))


def test_layer_bytes_count_state_and_ring():
    spec = Spec("mamba2", "step", 64, 128, 8, 16)
    state = 16 * 64 * 128 * 4
    ring = 16 * 17 * (64 * 2 + 4) + 2 * 17 * 128 * 2
    assert request.layer_bytes(spec, 16) == state + ring


def test_layer_bytes_of_gdn_share_keys():
    spec = Spec("gdn", "step", 128, 64, 2, 16, has_d=False)
    ring = 8 * 17 * (128 * 2 + 4) + 4 * 17 * 64 * 2
    assert request.layer_bytes(spec, 8) == 8 * 128 * 64 * 4 + ring


def test_layer_bytes_of_the_baseline_hold_a_state_a_token():
    spec = Spec("mamba2", "verify", 64, 128, 8, 16, 4)
    state = 16 * 64 * 128 * 4
    ring = 16 * 20 * (64 * 2 + 4) + 2 * 20 * 128 * 2
    assert request.layer_bytes(spec, 16) == state + ring
    assert request.layer_bytes(spec.native, 16) == 4 * state
    assert request.layer_bytes(dataclasses.replace(spec, op="step", num_tokens=1).native, 16) == state


def test_drafts_are_specs_of_their_own_and_bounded_by_the_baseline_s_states():
    layer = models.find("nemotron-3-super-120b-a12b")
    work, _ = resolve_work([layer], H200, tensor_parallel=(1,), state_dtypes=("fp32",), drafts=(0, 3, 7))
    assert [(item.spec.op, item.spec.num_tokens) for item in work] == [
        ("step", 1), ("verify", 4), ("verify", 8),
    ]  # fmt: skip
    small = dataclasses.replace(H200, memory_bytes=20 * 2**30)
    last = {}
    for drafts in (0, 7):
        (item,), _ = resolve_work(
            [layer], small, tensor_parallel=(1,), state_dtypes=("fp32",), drafts=(drafts,)
        )
        last[drafts] = item.effective_batches[-1]
    assert last == {0: 65536, 7: 32768}
    with pytest.raises(UsageError, match=r"takes 16\.0 GiB of state a layer") as refused:
        resolve_work(
            [layer], small, tensor_parallel=(1,), state_dtypes=("fp32",), drafts=(7,), batches=(512,)
        )
    assert "fewer --drafts" in str(refused.value.hint)


def test_specs_of_equal_rings_share_what_materialises_their_states():
    layer = models.find("nemotron-3-super-120b-a12b")
    work, _ = resolve_work(
        [layer, models.find("qwen3.5-4b")], H200, tensor_parallel=(1,), drafts=(0, 3), batches=(1, 64)
    )
    found = request.materializing(work, H200)
    assert [item.spec for item in found] == list(dict.fromkeys(item.spec.materialize for item in work))
    assert len(found) == len(work) / 2 == 4
    for item in found:
        of = [one for one in work if one.spec.materialize == item.spec]
        assert [one.spec.op for one in of] == ["step", "verify"]
        assert item.effective_batches == of[0].effective_batches
        assert item.layers == of[0].layers
        assert item.specs == (item.spec,)
        assert of[0].specs == (of[0].spec, of[0].spec.native)
    assert request.layer_bytes(found[0].spec, 128) - request.layer_bytes(work[0].spec, 128) == work[
        0
    ].spec.state_bytes(128)


def test_rings_are_of_the_activations_dtype_unless_asked_for():
    layer = models.find("qwen3.5-4b")
    given: dict[str, Any] = {"tensor_parallel": (1,), "state_dtypes": ("fp32", "bf16"), "drafts": (0, 3)}
    default, _ = resolve_work([layer], H200, **given)
    assert {item.spec.ring_dtype for item in default} == {"bf16"}
    asked, _ = resolve_work([layer], H200, **given, ring_dtypes=("bf16",))
    assert asked == default
    wide, _ = resolve_work([layer], H200, **given, ring_dtypes=("fp32",))
    assert [item.spec for item in wide] == [
        dataclasses.replace(item.spec, ring_dtype="fp32") for item in default
    ]
    both, _ = resolve_work([layer], H200, **given, ring_dtypes=("bf16", "fp32"))
    assert set(both) == {*default, *wide}
    folds = request.materializing(both, H200)
    assert {(item.spec.state_dtype, item.spec.ring_dtype) for item in folds} == {
        (state, ring) for state in ("fp32", "bf16") for ring in ("bf16", "fp32")
    }


def test_activations_and_rings_are_tuned_in_every_pair_that_can_be():
    layer = models.find("qwen3.5-4b")

    def pairs(activations: tuple[str, ...], rings: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        work, _ = resolve_work(
            [layer], H200, tensor_parallel=(1,), state_dtypes=("fp32",), drafts=(3,),
            activation_dtypes=activations, ring_dtypes=rings,
        )  # fmt: skip
        assert all(item.spec.native.activation_dtype == item.spec.activation_dtype for item in work)
        return [(item.spec.activation_dtype, item.spec.ring_dtype) for item in work]

    assert pairs(()) == pairs(("bf16",)) == [("bf16", "bf16")]
    assert pairs(("fp16", "fp32", "bf16")) == [("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "bf16")]
    assert pairs(("bf16", "fp16"), ("fp32",)) == [("bf16", "fp32"), ("fp16", "fp32")]
    assert pairs(("bf16", "fp16", "fp32"), ("fp16", "fp32", "bf16")) == [
        ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"),
    ]  # fmt: skip
    for activations, rings, message, option in (
        ((), ("fp16",), "rings of fp16 do not go with activations of bf16", "--ring-dtype"),
        (("fp16", "fp32"), ("fp16", "bf16"), "rings of bf16 do not go with activations of fp16 or fp32",
         "--ring-dtype"),
        (("bf16", "fp16"), ("bf16",), "activations of fp16 do not go with rings of bf16",
         "--activation-dtype"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message) as refused:
            pairs(activations, rings)
        assert refused.value.where == option
    with pytest.raises(ReplayError, match="activation_dtype 'fp8' is not one of"):
        pairs(("fp8",))


def test_activations_of_another_dtype_have_a_baseline_and_a_convolution_of_their_own():
    layer = models.find("qwen3.5-4b")
    given: dict[str, Any] = {
        "tensor_parallel": (1,),
        "batches": (1, 8),
        "activation_dtypes": ("bf16", "fp16"),
    }
    work, _ = resolve_work([layer], H200, state_dtypes=("fp32",), ring_dtypes=("fp32",), **given)
    assert len(request.curves(work)) == 4
    (folds,) = request.materializing(work, H200)  # of fp32 rings, whatever fills them
    assert folds.spec.ring_dtype == "fp32"
    found = request.resolve_convolutions([layer], drafts=(0, 3), **given)
    assert [work.spec.key for work in found] == [
        f"conv-w4-t{tokens}-{dtype}-{dtype}-{dtype}" for dtype in ("bf16", "fp16") for tokens in (1, 4)
    ]
    assert len({work.shapes for work in found}) == 1


def test_wider_rings_take_more_memory_and_share_the_baseline():
    layer = models.find("qwen3.5-4b")
    (narrow, wide), _ = resolve_work(
        [layer], H200, tensor_parallel=(1,), state_dtypes=("bf16",), ring_dtypes=("bf16", "fp32")
    )
    more = 32 * 17 * 128 * 2 + 16 * 17 * 128 * 2
    assert request.layer_bytes(wide.spec, 32) == request.layer_bytes(narrow.spec, 32) + more
    both = request.curves((narrow, dataclasses.replace(wide, effective_batches=(1, 32))))
    assert both == {
        narrow.spec: narrow.effective_batches,
        narrow.spec.native: (1, *narrow.effective_batches),
        wide.spec: (1, 32),
    }
    # A grid that ends where the ring alone does not fit any more.
    last = narrow.effective_batches[-1]
    tight = dataclasses.replace(
        H200,
        memory_bytes=int(
            request.LAYER_BUFFERS * request.layer_bytes(narrow.spec, last) / request.MEMORY_SHARE
        )
        + 1,
    )
    (narrow, wide), _ = resolve_work(
        [layer], tight, tensor_parallel=(1,), state_dtypes=("bf16",), ring_dtypes=("bf16", "fp32")
    )
    assert narrow.effective_batches[-1] == last > wide.effective_batches[-1]


def test_batches_whose_second_states_do_not_fit_are_left_out():
    layer = models.find("nemotron-3-super-120b-a12b")
    step, _ = resolve_work([layer], H200, tensor_parallel=(1,), state_dtypes=("fp32",))
    (whole,) = request.materializing(step, H200)
    assert whole.effective_batches == step[0].effective_batches
    tight = dataclasses.replace(H200, memory_bytes=8 * 2**30)
    (cut,) = request.materializing(step, tight)
    assert cut.effective_batches == step[0].effective_batches[: len(cut.effective_batches)]
    assert len(cut.effective_batches) < len(step[0].effective_batches)
    assert request.materializing(step, dataclasses.replace(H200, memory_bytes=2**10)) == ()


def test_work_of_both_families():
    names = ("nemotron-3-nano-4b", "qwen3.5-4b", "qwen3-next-80b-a3b")
    work, notes = resolve_work([models.find(name) for name in names], H200)
    assert not notes
    assert {item.spec.family for item in work} == {"mamba2", "gdn"}
    # Both GDN models have the same layer: one spec serves them, whatever the split.
    (gdn,) = (item for item in work if item.spec.family == "gdn" and item.spec.state_dtype == "fp32")
    assert gdn.layers == tuple(f"{name} tp{n}" for name in names[1:] for n in (1, 2, 4, 8))
    assert gdn.effective_batches[0] <= 16
    assert all(batch % 2 == 0 for batch in gdn.effective_batches)
    assert gdn.spec.native.family == "gdn"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10", Budget(minutes=10.0)),
        ("90s", Budget(minutes=1.5)),
        ("1.5h", Budget(minutes=90.0)),
        ("20 min", Budget(minutes=20.0)),
        ("500t", Budget(trials=500)),
        ("500 trials", Budget(trials=500)),
    ],
)
def test_budgets(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "0", "-5", "ten", "5 parsecs", "1.5t", "9" * 400, "9" * 400 + "t"])
def test_refused_budgets(text):
    with pytest.raises(UsageError, match="not a budget"):
        Budget.parse(text)


def test_a_time_is_over_once_its_minutes_are():
    assert Budget(minutes=1.5).until_s(10.0) == 100.0
    assert Budget(trials=5).until_s(10.0) == Budget().until_s(10.0) == float("inf")
