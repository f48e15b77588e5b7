"""Gate and timing of the convolution's tiles: its kernel, and wrong ones, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.interpreter import run_interpreted

FP32, FP16 = (f"-{name}" * 3 for name in ("fp32", "fp16"))


@pytest.mark.interpreter
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("key", [f"conv-w4-t1{FP32}", f"conv-w4-t3{FP16}", "conv-w2-t5-fp16-fp32-fp32"])
def test_the_kernel_passes_its_gate(key: str, packed: bool) -> None:
    assert run_interpreted("tests.tuner.conv_gates:gate", key, (32, 1), packed=packed) == ""


WRONG = {
    "a tap": (("tap + NUM_TOKENS >= WIDTH", "tap + NUM_TOKENS > WIDTH"), "outputs are off by up to"),
    "no bias": (("+ bias[None, :]", "+ 0 * bias[None, :]"), "outputs are off by up to"),
    "no activation": (("if SILU:", "if False:"), "outputs are off by up to"),
    "an append one behind": (("append = start + length + token", "append = start + length + token + 1"),
                             "values of the pool of rings differ"),
    "taps that do not wrap": (("tl.where(position < 0, position + ring_capacity, position)",
                               "tl.where(position < 0, 0, position)"), "from the same memory differ"),
    "appends that do not wrap": (("tl.where(append >= ring_capacity, append - ring_capacity, append)",
                                  "append"), "values of the pool of rings differ"),
    "an append of padded rows": (("live = token < tl.where(padded, 0, count)",
                                  "live = token < tl.where(padded & (slot < 0), 0, count)"), "differ"),
    "beyond the channels": (("inside = channel < channels", "inside = channel < channels + 8"), "differ"),
    "outputs beyond the channels": (("out_mask = mine[:, None] & inside[None, :]",
                                     "out_mask = mine[:, None] & (channel < channels + 8)[None, :]"),
                                    "what lies between outputs was written"),
    "padded outputs": (("total = tl.where(live[:, None], total, 0.0)", "total += 1.0 - live[:, None]"),
                       "tokens of nobody are not zeros"),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("key", "packed"), [(f"conv-w4-t3{FP32}", False), (f"conv-w4-t3{FP16}", True)])
def test_a_wrong_kernel_does_not(key: str, packed: bool, name: str) -> None:
    change, message = WRONG[name]
    assert message in run_interpreted("tests.tuner.conv_gates:gate", key, (32, 1), change, packed)


@pytest.mark.interpreter
def test_tokens_of_nobody_are_looked_at() -> None:
    wrong = ("while beyond < tokens", "while beyond + 1 < tokens")
    found = run_interpreted("tests.tuner.conv_gates:gate", f"conv-w4-t3{FP32}", (32, 1), wrong, True)
    assert "tokens of nobody are not zeros" in found


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_graph_has_a_launch_of_every_layer(tokens: int) -> None:
    found = run_interpreted("tests.tuner.conv_gates:timed", f"conv-w4-t{tokens}{FP16}", 2, 48)
    # Two layers at least, launched until a graph has eight launches.
    assert found == {"layers": 2, "launches": 8, "out": True, "ring": True, "roof": (3 + tokens, 2 * tokens)}


@pytest.mark.interpreter
def test_a_launch_that_leaves_outputs_unwritten_is_not_timed() -> None:
    wrong = (
        "out_mask = mine[:, None] & inside[None, :]",
        "out_mask = mine[:, None] & (inside & (channel < 40))[None, :]",
    )
    with pytest.raises(RuntimeError, match=r"tile b32\.w1 left outputs unwritten"):
        run_interpreted("tests.tuner.conv_gates:timed", f"conv-w4-t1{FP16}", 2, 48, wrong)
