"""Buffers that kernels are timed on: complete, and with numbers as models have them."""

import types

import pytest
import torch

from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.measure import LayerStack
from replayssm_tune.tuner.shapes import Shape

SPECS = (
    Spec("mamba2", "step", 8, 16, 2, 4, has_z=True),
    Spec("gdn", "step", 8, 16, 2, 4, has_d=False, qk_l2norm=True),
    Spec("gdn", "step", 8, 16, 2, 4, has_d=False, state_dtype="bf16"),
)


@pytest.fixture
def stack_of(monkeypatch):
    def build(spec):
        properties = types.SimpleNamespace(L2_cache_size=4096)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return LayerStack(spec, Shape(3, 4), torch.device("cpu"))

    return build


@pytest.mark.parametrize("op", ["step", "native_step"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_every_argument_has_a_buffer_of_its_dtype_and_dimensions(stack_of, spec, op):
    spec = spec if op == "step" else spec.native
    structure = Structure("native" if spec.is_native else "both")
    stack = stack_of(spec)
    layers = stack._layer_arguments(structure, "mix")
    assert len(layers) == stack.layers
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32"}
    for tensors in layers:
        for argument, tensor in zip(tensor_arguments(spec, structure), tensors, strict=True):
            assert names[tensor.dtype] == argument.dtype, argument.name
            assert tensor.dim() == 1 + len(argument.stride_dims), argument.name
            assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
            assert tensor.numel(), argument.name


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: spec.key)
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
