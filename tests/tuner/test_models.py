"""Known models, config files of serving engines, and the split of a layer over GPUs."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.runtime.errors import SpecError
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner import models
from replayssm_tune.tuner.errors import UsageError
from replayssm_tune.tuner.models import Model


def test_known_models_can_be_served():
    assert {*models.DEFAULT_MODELS} <= {model.name for model in models.known()}
    for model in models.known():
        assert models.specs(model, (1,), ("fp32", "bf16"), window=16), model.name


def test_known_models_of_both_families():
    assert {model.family for model in models.known()} == {"mamba2", "gdn"}
    model = models.find("qwen3.5-122b-a10b")
    assert (model.family, model.heads, model.groups, model.head_dim) == ("gdn", 64, 16, 128)
    assert all(models.find(name).family == "mamba2" for name in models.DEFAULT_MODELS)


def test_find_ignores_case_and_suggests():
    assert models.find("Nemotron-3-Nano-4B").head_dim == 80
    with pytest.raises(UsageError) as error:
        models.find("nemotron-3-nano-4")
    assert "did you mean nemotron-3-nano-4b" in error.value.hint
    assert "--hf-config" in error.value.hint


CONFIGS: dict[str, tuple[dict[str, object], Model]] = {
    "nemotron_h": (
        {
            "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8,
            "mamba_ssm_cache_dtype": "bfloat16",
        },
        Model("", 128, 80, 128, 8, "bf16"),
    ),
    "mamba2": (
        {"num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1},
        Model("", 80, 64, 128, 1),
    ),
    "granitemoehybrid": (
        {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
        Model("", 48, 64, 128, 1),
    ),
    "bamba": (
        {
            "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1,
            "mamba_expand": 2, "hidden_size": 4096,
        },
        Model("", 128, 64, 128, 1),
    ),
    "falcon_h1": (
        {
            "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
            "mamba_d_ssm": 3072,
        },
        Model("", 24, 128, 256, 1),
    ),
    "qwen3_next": (
        {
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 64, "head_dim": 256, "num_attention_heads": 16,
        },
        Model("", 32, 64, 128, 16, family="gdn"),
    ),
    "qwen3_5_moe_text": (
        {
            "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "bfloat16",
        },
        Model("", 64, 128, 128, 16, "bf16", family="gdn"),
    ),
    "zamba2": (
        {
            "n_mamba_heads": 112, "mamba_d_state": 64, "mamba_ngroups": 2, "mamba_expand": 2,
            "hidden_size": 3584,
        },
        Model("", 112, 64, 64, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_config_files(tmp_path, family):
    config, expected = CONFIGS[family]
    folder = tmp_path / "some-model"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, **config}))
    found = models.from_hf_config(path)
    assert found == dataclasses.replace(expected, name="some-model", verified=False)


def test_a_text_config_goes_before_what_is_beside_it(tmp_path):
    inner, expected = CONFIGS["qwen3_next"]
    path = tmp_path / "config.json"
    for text_config in ({"model_type": "qwen3_5_text", **inner}, inner):
        outer = {"model_type": "qwen3_5", "linear_num_value_heads": 1, "text_config": text_config}
        path.write_text(json.dumps(outer))
        assert models.from_hf_config(path).heads == expected.heads


@pytest.mark.parametrize("family", CONFIGS)
def test_missing_key_is_named(tmp_path, family):
    config, _ = CONFIGS[family]
    path = tmp_path / "config.json"
    key = next(key for key in config if "state_size" in key or "d_state" in key or "key_head_dim" in key)
    path.write_text(json.dumps({"model_type": family, **{k: v for k, v in config.items() if k != key}}))
    with pytest.raises(UsageError, match=f"no key '{key}'") as error:
        models.from_hf_config(path)
    assert error.value.where == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "llama"}', 'model_type "llama"'),
        ("{}", "model_type null"),
        ('{"model_type": ["mamba2"]}', 'model_type ["mamba2"]'),
        ('{"model_type": {"mamba2": 1}}', 'model_type {"mamba2": 1}'),
        ("[" * 100_000, "not JSON"),
        (
            '{"model_type": "mamba2", "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, '
            '"mamba_ssm_dtype": ["float32"]}',
            "key 'mamba_ssm_dtype' is [\"float32\"]",
        ),
        (
            '{"model_type": "mamba2", "num_heads": "80", "head_dim": 64, "state_size": 128, "n_groups": 1}',
            "key 'num_heads' is \"80\"",
        ),
        (
            '{"model_type": "zamba2", "n_mamba_heads": 7, "mamba_expand": 2, "hidden_size": 64}',
            "128 is not divisible by 7 heads",
        ),
    ],
)
def test_unusable_configs(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        models.from_hf_config(path)
    assert message in error.value.what
    assert error.value.hint


def test_config_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        models.from_hf_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("heads", "groups", "gpus", "numbers"),
    [
        (100, 8, 1, "100 heads are not divisible by 8 groups"),
        (64, 8, 5, "64 heads are not divisible by 5 GPUs"),
        (48, 6, 4, "6 groups"),
        (0, 1, 1, "0 heads"),
    ],
)
def test_refused_splits_name_the_numbers(heads, groups, gpus, numbers):
    with pytest.raises(SpecError, match=numbers) as error:
        models.split(Model("m", heads, 64, 128, groups), gpus)
    assert error.value.hint


def test_key_heads_are_split_with_the_value_heads():
    layer = models.find("qwen3.5-27b")
    share = models.split(layer, 8)
    assert (share.heads, share.groups, share.heads_per_group, share.note) == (6, 2, 3, "")
    with pytest.raises(SpecError, match="48 value heads are not divisible by 32 GPUs"):
        models.split(layer, 32)
    few = Model("m", 8, 128, 128, 2, family="gdn")
    assert models.split(few, 4).note.endswith("2 key head(s) are replicated 2x, one on every GPU")


def test_specs_are_of_the_models_family():
    (spec, heads), = models.specs(models.find("qwen3.5-4b"), (2,), (), window=16)  # fmt: skip
    assert heads == 16
    assert spec == Spec(
        "gdn", "step", 128, 128, 2, 16, has_d=False, has_z=False, has_dt_bias=True, qk_l2norm=True
    )
    (mamba, _), = models.specs(models.find("nemotron-3-nano-4b"), (1,), (), window=16)  # fmt: skip
    assert mamba == Spec("mamba2", "step", 80, 128, 12, 16)


def test_few_groups_are_replicated_and_said_so():
    share = models.split(models.find("falcon-h1-34b"), 4)
    assert (share.heads, share.groups, share.heads_per_group) == (8, 1, 8)
    assert "replicated 2x" in share.note


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from([1, 2, 4, 8]))
def test_a_split_keeps_every_head(heads_per_group, groups, gpus):
    model = Model("m", heads_per_group * groups, 64, 128, groups)
    try:
        share = models.split(model, gpus)
    except SpecError:
        assert model.heads % gpus or (groups % gpus and gpus % groups)
        return
    assert share.heads * gpus == model.heads
    assert share.heads == share.heads_per_group * share.groups
    assert bool(share.note) == (share.groups * gpus != groups)


def test_specs_share_a_kernel_over_splits():
    found = models.specs(models.find("nemotron-3-nano-4b"), (1, 8), (), window=16)
    assert [heads for _, heads in found] == [96, 12]
    assert len({spec for spec, _ in found}) == 1
    assert found[0][0].state_dtype == "fp32"


def test_refused_specs_name_the_model():
    with pytest.raises(SpecError, match="window 0") as error:
        models.specs(models.find("nemotron-3-nano-4b"), (1,), (), window=0)
    assert error.value.where == "nemotron-3-nano-4b"
    with pytest.raises(SpecError, match="beyond the window of 4"):
        models.specs(models.find("nemotron-3-nano-4b"), (1,), (), window=4, drafts=4)
