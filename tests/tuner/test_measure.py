"""Buffers that kernels are timed on: complete, and with numbers as models have them."""

import dataclasses
import types
from unittest import mock

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime.abi import launch_structure, tensor_arguments
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.interpreted import small_variant
from replayssm_tune.tuner.measure import LayerStack
from replayssm_tune.tuner.mix import accepted_tokens, cycle
from replayssm_tune.tuner.records import score_mode
from replayssm_tune.tuner.shapes import Shape, shape_for
from tests.interpreter import interpreted

SPECS = (
    Spec("mamba2", "step", 8, 16, 2, 4, has_z=True),
    Spec("gdn", "step", 8, 16, 2, 4, has_d=False, qk_l2norm=True),
    Spec("gdn", "step", 8, 16, 2, 4, has_d=False, state_dtype="bf16"),
    Spec("mamba2", "verify", 8, 16, 2, 8, 4, has_z=True),
    Spec("gdn", "verify", 8, 16, 2, 4, 3, has_d=False, state_dtype="bf16"),
)
FOLDS = tuple(dict.fromkeys(spec.materialize for spec in SPECS))
ROWS, HEADS = 3, 4


@pytest.fixture
def stack_of(monkeypatch):
    def build(spec):
        properties = types.SimpleNamespace(L2_cache_size=4096)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return LayerStack(spec, Shape(ROWS, HEADS), torch.device("cpu"))

    return build


@pytest.mark.parametrize(
    "spec", [*SPECS, *(spec.native for spec in SPECS), *FOLDS], ids=lambda spec: spec.key
)
def test_every_argument_has_a_buffer_of_its_dtype_and_dimensions(stack_of, spec):
    structure = launch_structure(spec)
    stack = stack_of(spec)
    layers = stack._layer_arguments(structure, score_mode(spec))
    assert len(layers) == stack.layers
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32"}
    for tensors in layers:
        for argument, tensor in zip(tensor_arguments(spec, structure), tensors, strict=True):
            if argument.stride_dims[:1] == ("token",):
                assert len(tensor) == ROWS * spec.num_tokens, argument.name
            assert names[tensor.dtype] == argument.dtype, argument.name
            assert tensor.dim() == 1 + len(argument.stride_dims), argument.name
            assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
            assert tensor.numel(), argument.name


def arguments_of(stack, mode):
    """Tensors of every layer by name."""
    structure = launch_structure(stack.spec)
    names = [argument.name for argument in tensor_arguments(stack.spec, structure)]
    return [dict(zip(names, tensors, strict=True)) for tensors in stack._layer_arguments(structure, mode)]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.verifies], ids=lambda spec: spec.key)
def test_rows_that_verify_have_all_their_tokens_and_the_baseline_a_slot_for_each(stack_of, spec):
    tokens = spec.num_tokens
    for one in (spec, spec.native):
        for given in arguments_of(stack_of(one), "mix"):
            assert given["query_start"].tolist() == [row * tokens for row in range(ROWS + 1)]
    slot_index = given["slot_index"]
    assert slot_index.shape == (ROWS, tokens)
    assert slot_index.unique().numel() == slot_index.numel()
    assert int(slot_index.max()) < len(given["state"])
    assert given["accepted"].tolist() == [accepted_tokens(spec)] * ROWS


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_over_the_layers_the_mix_meets_every_length_of_the_cycle(stack_of, spec):
    stack = stack_of(spec)
    layers = arguments_of(stack, "mix")
    lengths = [given["ring_len"][slot].item() for given in layers for slot in given["slot_index"].long()]
    counts = [lengths.count(length) for length in range(1, cycle(spec) + 1)]
    assert sum(counts) == len(lengths) > cycle(spec)
    assert max(counts) - min(counts) <= 1
    # Where they do not come out even, rows that flush are the ones more.
    assert counts == sorted(counts)
    for mode, flushes in (("nonflush", False), ("flush", True)):
        for given in arguments_of(stack, mode):
            served = given["ring_len"][given["slot_index"].long()]
            assert bool(((served + spec.num_tokens > spec.window) == flushes).all())


@pytest.mark.parametrize("spec", FOLDS, ids=lambda spec: spec.key)
def test_whole_rings_are_materialised_into_other_slots(stack_of, spec):
    stack = stack_of(spec)
    for given in arguments_of(stack, "materialize"):
        slots = torch.cat([given["slot_index"], given["destination"]])
        assert len({*slots.tolist()}) == 2 * ROWS
        assert 0 < int(slots.min()) < int(slots.max()) < len(given["state"])
        assert given["ring_len"][given["slot_index"].long()].tolist() == [spec.window] * ROWS
        assert given["prefix"].tolist() == [spec.window] * ROWS
    assert sum(state.nbytes for state in stack.states()) == stack.layers * spec.state_bytes(ROWS * HEADS)


@pytest.mark.parametrize("spec", FOLDS, ids=lambda spec: spec.key)
def test_that_states_are_materialised_is_proven_by_those_of_the_destinations(stack_of, spec):
    stack = stack_of(spec)
    stack.clear()
    for given in arguments_of(stack, "materialize"):
        state, slots = given["state"], given["destination"].long()
        state[slots] = torch.randn(state[slots].shape).to(state.dtype)
    stack.prove("materialize")
    state[slots[1], :, 0] = 0
    with pytest.raises(RuntimeError, match=r"in mode materialize .* states were written"):
        stack.prove("materialize")
    stack.clear()
    for given in arguments_of(stack, "materialize"):  # into the sources
        given["state"][given["slot_index"].long()] = 1.0
    with pytest.raises(RuntimeError, match="in mode materialize 0 of"):
        stack.prove("materialize")


def launched(stack, mode, wrongly=()):
    """The state writes of a right kernel, but for the (layer, row) that ``wrongly`` names."""
    spec = stack.spec
    for number, given in enumerate(arguments_of(stack, mode)):
        for row in range(ROWS):
            slots = given["slot_index"][row].reshape(-1).long()
            writes = stack.native or given["ring_len"][slots].item() + spec.num_tokens > spec.window
            if writes != ((number, row) in wrongly):
                given["state"][slots] = torch.randn(given["state"][slots].shape).to(given["state"].dtype)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_that_both_branches_ran_is_proven_by_the_states(stack_of, spec, native):
    stack = stack_of(spec.native if native else spec)
    for mode in ("native",) if native else ("mix", "nonflush", "flush"):
        stack.clear()
        launched(stack, mode)
        stack.prove(mode)
        stack.clear()
        launched(stack, mode, {(1, 2)})
        with pytest.raises(RuntimeError, match=f"in mode {mode} .* states were written"):
            stack.prove(mode)


def test_a_plan_that_never_flushes_is_not_timed_in_the_mix(stack_of):
    stack = stack_of(SPECS[3])
    stack.clear()
    with pytest.raises(RuntimeError, match="in mode mix 0 of"):
        stack.prove("mix")


@pytest.mark.parametrize("spec", SPECS[1:3], ids=lambda spec: spec.key)
def test_numbers_of_gdn_are_those_of_models(stack_of, spec):
    tensors = stack_of(spec)._tensors
    rate = tensors["a"].exp()[:, None]
    gates = -rate * torch.nn.functional.softplus(tensors["dt"].float() + tensors["dt_bias"][:, None])
    decay = gates.exp()
    assert 0.9 < float(decay.median()) < 0.999
    ring_decay = tensors["ring_decay"].exp()
    assert 0.9 <= float(ring_decay.min()) <= float(ring_decay.max()) < 1
    for name in ("b", "c", "ring_b"):
        assert float(tensors[name].float().norm(dim=-1).mean()) == pytest.approx(1, abs=0.1), name


INTERPRETED = tuple(
    dataclasses.replace(spec, activation_dtype="fp16", ring_dtype="fp16", state_dtype="fp32")
    for spec in (*SPECS[:2], *SPECS[3:], SPECS[3].native, SPECS[4].native, *FOLDS[:2])
)


@pytest.mark.parametrize("spec", INTERPRETED, ids=lambda spec: spec.key)
@interpreted
def test_launches_do_what_their_mode_says(spec, tmp_path):
    """Real kernels on the buffers that are timed, in Triton's interpreter."""
    cuda = types.SimpleNamespace(
        get_device_properties=lambda device: types.SimpleNamespace(L2_cache_size=4096),
        current_stream=lambda: types.SimpleNamespace(cuda_stream=0),
    )
    role = default_plan(spec).variants[0].structure
    structure = dataclasses.replace(role, role=launch_structure(spec).role)
    variant = small_variant(spec, structure)
    source = rendered(tmp_path)

    def compiler(spec, variants, dtypes):
        return CompiledPlan(spec, variants, source, dtypes, aligned=True)

    with mock.patch.multiple(torch.cuda, **vars(cuda)):
        stack = LayerStack(spec, Shape(ROWS, HEADS), torch.device("cpu"))
        for mode in ("mix", "nonflush", "flush") if spec.op in ("step", "verify") else (score_mode(spec),):
            stack.clear()
            for call in stack.calls((variant,), mode, compiler):
                call()
            stack.prove(mode)
            for tensors in arguments_of(stack, mode):
                assert torch.isfinite(tensors.get("out", tensors["state"])).all()
                assert torch.isfinite(tensors["state"]).all()


@pytest.mark.parametrize("heads_per_group", [1, 8, 12, 16])
def test_shapes_are_whole_groups_near_the_batch_asked_for(heads_per_group):
    spec = Spec("mamba2", "step", 64, 128, heads_per_group, 16)
    for batch in (8, 16, 24, 192, 1000, 32768):
        shape = shape_for(spec, batch)
        assert shape.heads % heads_per_group == 0
        assert shape.effective_batch == shape.rows * shape.heads
        # Whole groups, and the same number of them in every sequence.
        slack = heads_per_group * shape.rows / 2 + heads_per_group / 2
        assert abs(shape.effective_batch - batch) <= max(slack, heads_per_group - batch)
