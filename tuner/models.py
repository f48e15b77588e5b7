"""Models: the layer shapes the tuner knows, those read from a config file, and their split over GPUs."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..runtime.errors import SpecError
from ..runtime.spec import FAMILIES, Spec
from .errors import UsageError

DEFAULT_MODELS: Final = ("nemotron-3-super-120b-a12b", "nemotron-3-nano-30b-a3b", "nemotron-3-nano-4b")
"""Models tuned where none is named."""

DEFAULT_TENSOR_PARALLEL: Final = (1, 2, 4, 8)
"""Splits tuned where none is named; those that a model cannot have are left out."""


@dataclass(frozen=True)
class Model:
    """A layer at tensor parallel 1, in the words of :class:`.spec.Spec`.

    ``heads`` of Gated DeltaNet (``gdn``) are value heads, ``head_dim`` is the value dim, ``state_size``
    the key dim, and ``groups`` are key heads. ``state_dtype`` is the dtype the model's authors store the
    state in (``fp32``, ``bf16``, ``fp16``).
    """

    name: str
    heads: int
    head_dim: int
    state_size: int
    groups: int
    state_dtype: str = "fp32"
    verified: bool = True
    family: str = "mamba2"
    conv_width: int = 4
    """Inputs that an output of the convolution in front of the layer is made of; 4 in every known model."""

    @property
    def words(self) -> tuple[str, str]:
        """What the family calls ``heads`` and ``groups``."""
        return ("value heads", "key heads") if self.family == "gdn" else ("heads", "groups")


@dataclass(frozen=True)
class Split:
    """One GPU's share of a layer."""

    heads: int
    groups: int
    note: str = ""
    """What a user should know, e.g. that groups are replicated; empty where nothing is unusual."""

    @property
    def heads_per_group(self) -> int:
        """Heads that share one B and one C (value heads that share a key head)."""
        return self.heads // self.groups


@functools.cache
def known() -> tuple[Model, ...]:
    """Every known model, in the order of the data file."""
    text = (importlib.resources.files(__package__) / "models.json").read_text(encoding="utf-8")
    models = json.loads(text)
    return tuple(Model(**entry, family=family) for family in FAMILIES for entry in models[family])


def find(name: str) -> Model:
    """The known model of that name; case does not count.

    Raises:
        UsageError: Nobody knows the name; similar names are suggested.
    """
    models = {model.name: model for model in known()}
    found = models.get(name.strip().lower())
    if found is not None:
        return found
    similar = difflib.get_close_matches(name.strip().lower(), models, n=2, cutoff=0.5)
    suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
    raise UsageError(
        f"unknown model '{name}'",
        where="--model",
        hint=f"{suggestion}known are {', '.join(models)}; for others give --hf-config or the shape",
    )


@dataclass(frozen=True)
class _Keys:
    """Where a family of configs keeps the shape; the first key that is present counts."""

    heads: tuple[str, ...]
    head_dim: tuple[str, ...]
    state_size: tuple[str, ...]
    groups: tuple[str, ...]
    expand: tuple[str, ...] = ()
    family: str = "mamba2"
    conv_width: tuple[str, ...] = ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")


_BAMBA: Final = _Keys(
    ("mamba_n_heads",), ("mamba_d_head",), ("mamba_d_state",), ("mamba_n_groups",), ("mamba_expand",)
)
_QWEN: Final = _Keys(
    ("linear_num_value_heads",),
    ("linear_value_head_dim",),
    ("linear_key_head_dim",),
    ("linear_num_key_heads",),
    family="gdn",
)
_HF_KEYS: Final[dict[str, _Keys]] = {
    "nemotron_h": _Keys(
        ("mamba_num_heads",), ("mamba_head_dim",), ("ssm_state_size",), ("n_groups",), ("expand",)
    ),
    "mamba2": _Keys(("num_heads",), ("head_dim",), ("state_size",), ("n_groups",), ("expand",)),
    "granitemoehybrid": _BAMBA,
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "zamba2": _Keys(
        ("n_mamba_heads",), ("mamba_headdim",), ("mamba_d_state",), ("mamba_ngroups",), ("mamba_expand",)
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN),
}
_HF_STATE_DTYPE_KEYS: Final = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_HF_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def from_hf_config(path: Path) -> Model:
    """The Mamba-2 or Gated DeltaNet layer that a Hugging Face ``config.json`` describes.

    What a ``text_config`` says goes before what is beside it. The state dtype is the config's own where
    it names one, else fp32.

    Raises:
        UsageError: The file cannot be read, is of a family without such layers, or lacks a key.
    """
    where = str(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the config: {error.strerror}", where=where, hint="give the path of a config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the config is not JSON: {error}", where=where, hint="give the path of a config.json"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(
            "the config is not a JSON object", where=where, hint="give the path of a config.json"
        )
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _HF_KEYS:
        raise UsageError(
            f"model_type {json.dumps(family)} is not known to have Mamba-2 or Gated DeltaNet layers",
            where=where,
            hint=f"known are {', '.join(_HF_KEYS)}; for others give "
            "--heads, --head-dim, --state-size and --groups, and --family where it is not Mamba-2",
        )
    keys = _HF_KEYS[family]
    heads = _integer(config, keys.heads, where)
    name = str(config.get("_name_or_path") or "") or path.resolve().parent.name or family
    return Model(
        name=name,
        heads=heads,
        head_dim=_head_dim(config, keys, heads, where),
        state_size=_integer(config, keys.state_size, where),
        groups=_integer(config, keys.groups, where),
        state_dtype=_state_dtype(config, where),
        verified=False,
        family=keys.family,
        conv_width=_conv_width(config, keys, where),
    )


def _integer(config: Mapping[str, Any], keys: Sequence[str], where: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"key '{key}' is {json.dumps(value)}, not a positive integer",
                where=where,
                hint="correct the config, or give the shape by options in its place",
            )
        return value
    raise UsageError(
        f"the config has no key '{keys[0]}'",
        where=where,
        hint="add it, or give the shape by options in place of the config: --family, --heads, --head-dim, "
        "--state-size, --groups",
    )


def _conv_width(config: Mapping[str, Any], keys: _Keys, where: str) -> int:
    said = any(config.get(key) is not None for key in keys.conv_width)
    return _integer(config, keys.conv_width, where) if said else Model.conv_width


def _head_dim(config: Mapping[str, Any], keys: _Keys, heads: int, where: str) -> int:
    """The head dim, or the inner width over the heads where the config leaves it to that."""
    if config.get(keys.head_dim[0]) not in (None, "auto"):
        return _integer(config, keys.head_dim, where)
    if all(config.get(key) is None for key in (*keys.expand, "mamba_d_ssm")):
        return _integer(config, keys.head_dim, where)
    if config.get("mamba_d_ssm") is not None:
        width = _integer(config, ("mamba_d_ssm",), where)
    else:
        width = _integer(config, keys.expand, where) * _integer(config, ("hidden_size",), where)
    if width % heads:
        raise UsageError(
            f"inner width {width} is not divisible by {heads} heads",
            where=where,
            hint=f"set '{keys.head_dim[0]}' in the config",
        )
    return width // heads


def _state_dtype(config: Mapping[str, Any], where: str) -> str:
    for key in _HF_STATE_DTYPE_KEYS:
        value = config.get(key)
        if value in (None, "auto"):
            continue
        if not isinstance(value, str) or value not in _HF_DTYPES:
            raise UsageError(
                f"key '{key}' is {json.dumps(value)}, not one of {', '.join(_HF_DTYPES)}",
                where=where,
                hint="give --state-dtype and remove the key",
            )
        return _HF_DTYPES[value]
    return "fp32"


def split(model: Model, tensor_parallel: int) -> Split:
    """One GPU's share of ``model`` over ``tensor_parallel`` GPUs.

    Groups (key heads) are split with the heads. Fewer of them than GPUs are replicated, as serving
    engines do: every GPU then holds one group.

    Raises:
        SpecError: Heads cannot be divided among groups or GPUs, or groups among GPUs.
    """
    where = f"{model.name} at tensor parallel {tensor_parallel}"
    head, group = model.words
    if min(model.heads, model.groups, tensor_parallel) < 1:
        raise SpecError(
            f"{model.heads} {head}, {model.groups} {group}, {tensor_parallel} GPUs: each must be at least 1",
            where=where,
            hint="give positive numbers",
        )
    if model.heads % model.groups:
        raise SpecError(
            f"{model.heads} {head} are not divisible by {model.groups} {group}",
            where=where,
            hint=f"all {group} must serve the same number of {head}: correct --heads or --groups",
        )
    if model.heads % tensor_parallel:
        raise SpecError(
            f"{model.heads} {head} are not divisible by {tensor_parallel} GPUs",
            where=where,
            hint=f"choose --tp from the divisors of {model.heads}",
        )
    heads = model.heads // tensor_parallel
    if model.groups % tensor_parallel == 0:
        return Split(heads, model.groups // tensor_parallel)
    if tensor_parallel % model.groups == 0:
        copies = tensor_parallel // model.groups
        return Split(
            heads,
            1,
            note=f"{where}: {model.groups} {group[:-1]}(s) are replicated {copies}x, one on every GPU",
        )
    raise SpecError(
        f"{model.groups} {group} can be neither divided among nor replicated over {tensor_parallel} GPUs",
        where=where,
        hint="choose --tp so that one of the two numbers divides the other",
    )


def conv_channels(model: Model, tensor_parallel: int) -> int:
    """Channels on one GPU of the convolution in front of a layer: x, B and C, or (GDN) q, k and v.

    Raises:
        SpecError: As :func:`split`.
    """
    share = split(model, tensor_parallel)
    return share.heads * model.head_dim + 2 * share.groups * model.state_size


def specs(
    model: Model,
    tensor_parallel: Iterable[int],
    state_dtypes: Iterable[str],
    window: int,
    drafts: int = 0,
    token_dtypes: Iterable[tuple[str, str]] = (),
) -> list[tuple[Spec, int]]:
    """Every ``step`` (with drafts: ``verify``) spec of ``model`` with the heads that one GPU holds of it.

    Layers are as their models have them: Mamba-2 with a skip, GDN with q and k normalised by the kernel.

    Args:
        model: The layer at tensor parallel 1.
        tensor_parallel: Numbers of GPUs a layer is split over.
        state_dtypes: ``fp32``, ``bf16``, ``fp16``; empty takes the model's own.
        window: Ring tokens before a flush.
        drafts: Draft tokens verified per step; a step takes ``1 + drafts`` tokens.
        token_dtypes: Dtypes of activations and ring; empty takes bf16 for both.

    Raises:
        SpecError: A split or a shape that no kernel can serve; the place names the model.
    """
    found: list[tuple[Spec, int]] = []
    for gpus in tensor_parallel:
        share = split(model, gpus)
        dtypes = itertools.product(
            tuple(state_dtypes) or (model.state_dtype,),
            tuple(token_dtypes) or ((Spec.activation_dtype, Spec.ring_dtype),),
        )
        for state_dtype, (activation_dtype, ring_dtype) in dtypes:
            try:
                spec = Spec(
                    family=model.family,
                    op="verify" if drafts else "step",
                    head_dim=model.head_dim,
                    state_size=model.state_size,
                    heads_per_group=share.heads_per_group,
                    window=window,
                    num_tokens=1 + drafts,
                    activation_dtype=activation_dtype,
                    state_dtype=state_dtype,
                    ring_dtype=ring_dtype,
                    has_d=model.family == "mamba2",
                    qk_l2norm=model.family == "gdn",
                )
            except SpecError as error:
                what, _, advice = error.what.partition("; ")
                raise SpecError(
                    what, where=model.name, hint=error.hint or advice or "change the option"
                ) from error
            found.append((spec, share.heads))
    return found
