"""Options shared by the verbs, declared once, and the request they add up to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ...codegen.targets import Gpu
from ...runtime.spec import DTYPE_BYTES, FAMILIES, Spec
from .. import models, request
from ..errors import UsageError
from ..models import Model

Function = TypeVar("Function", bound=Callable[..., Any])

STORE: Final = Path(".replayssm/store")
OUTPUT: Final = Path(".replayssm/generated")
"""Where a run keeps its measurements and puts its results unless told otherwise."""


Callback = Callable[[click.Context, click.Parameter, Any], Any]


class _Path(click.Path):
    """As :class:`click.Path`; an empty one, as of a variable that is unset, is not the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path names nothing; write . for the working directory", param, ctx)
        return super().convert(value, param, ctx)


PATH: Final = _Path(path_type=Path)
"""Type of options and arguments that take a path."""
FILE: Final = _Path(path_type=Path, dir_okay=False)
"""The same, of a file."""


def integers(minimum: int) -> Callback:
    """Callback of an option that takes integers separated by commas; repeated values count once."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in value.split(",")))
        except ValueError:
            raise click.BadParameter(
                f"'{value}' is not a list of integers; write for example 1,8,64", ctx, param
            ) from None
        if min(numbers) < minimum:
            raise click.BadParameter(f"{min(numbers)} is below {minimum}", ctx, param)
        return numbers

    return parse


def dtypes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Callback of an option that takes dtypes separated by commas; repeated values count once."""
    if value is None:
        return None
    names = tuple(dict.fromkeys(part.strip().lower() for part in value.split(",")))
    for name in names:
        if name not in DTYPE_BYTES:
            raise click.BadParameter(f"'{name}' is not one of {', '.join(DTYPE_BYTES)}", ctx, param)
    return names


def store_location(ctx: click.Context, param: click.Parameter, value: str) -> Path | str:
    """Callback of ``--store``: a database's URL stays as it is, since a path would lose a slash."""
    if "\0" in value or not value:
        raise click.BadParameter("give the path of a file, or the URL of a database", ctx, param)
    return value if "://" in value else Path(value)


def _stack(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def apply(function: Function) -> Function:
        return functools.reduce(lambda inner, decorate: decorate(inner), reversed(decorators), function)

    return apply


def gpu_option(function: Function) -> Function:
    """``--gpu``."""
    return click.option(
        "--gpu",
        metavar="NAME",
        help="GPU to work for, e.g. H100. What compiles or times checks it against the one present; without "
        "one here a tune or plan is static. Default: the GPU found.",
    )(function)


def static_option(function: Function) -> Function:
    """``--static``."""
    return click.option("--static", is_flag=True, help="Measure nothing, even if the GPU is here.")(function)


def workload_options(function: Function) -> Function:
    """Which layers, and the batches they are tuned for."""
    return _stack(
        click.option(
            "--model",
            "model_names",
            multiple=True,
            metavar="NAME",
            help=f"Known model; may be repeated. Default: {', '.join(models.DEFAULT_MODELS)}.",
        ),
        click.option(
            "--hf-config",
            type=PATH,
            metavar="FILE",
            help="A Hugging Face config.json that gives the shape; may stand beside --model.",
        ),
        click.option(
            "--family",
            type=click.Choice(FAMILIES),
            help=f"Explicit shape: the recurrence. Default: {FAMILIES[0]}.",
        ),
        click.option(
            "--heads",
            type=int,
            metavar="N",
            help="Explicit shape: heads (gdn: value heads) before the split.",
        ),
        click.option("--head-dim", type=int, metavar="N", help="Explicit shape: values per head."),
        click.option(
            "--state-size", type=int, metavar="N", help="Explicit shape: state columns (gdn: the key dim)."
        ),
        click.option(
            "--groups",
            type=int,
            metavar="N",
            help="Explicit shape: groups of B and C (gdn: key heads). Default: 1.",
        ),
        click.option(
            "--tp",
            callback=integers(1),
            metavar="LIST",
            help="Tensor-parallel splits. Default: 1,2,4,8, as far as a model can be split so.",
        ),
        click.option(
            "--drafts",
            callback=integers(0),
            default="0",
            show_default=True,
            metavar="LIST",
            help="Draft tokens verified per step.",
        ),
        click.option(
            "--activation-dtype",
            callback=dtypes,
            metavar="LIST",
            help="Dtypes of the layers' inputs and outputs, convolutions included: bf16, fp16, fp32. "
            f"Default: {Spec.activation_dtype}.",
        ),
        click.option(
            "--state-dtype",
            callback=dtypes,
            metavar="LIST",
            help="State dtypes: fp32, bf16, fp16. Default: fp32,bf16 and the model's own.",
        ),
        click.option(
            "--ring-dtype",
            callback=dtypes,
            metavar="LIST",
            help="Dtypes of the layers' rings: that of the activations, or fp32; every pair that can be is "
            "tuned. Default: that of the activations.",
        ),
        click.option(
            "--buffer-len",
            type=int,
            default=16,
            show_default=True,
            metavar="N",
            help="Ring tokens held before a flush (the window).",
        ),
        click.option(
            "--batch",
            callback=integers(1),
            metavar="LIST",
            help="Sequences per GPU. Default: a grid from one sequence up to an effective batch "
            f"(sequences x heads) of {request.MAX_EFFECTIVE_BATCH}.",
        ),
    )(function)


def budget_option(function: Function) -> Function:
    """``--budget``."""
    return click.option(
        "--budget",
        metavar="MINUTES|TRIALS",
        help="Stop searching after a time (10, 90s, 1.5h; a bare number is minutes) or a number of trials "
        "(500t). Without a GPU either bounds what is compiled, and a time does to plan.",
    )(function)


def batch_invariant_option(function: Function) -> Function:
    """``--batch-invariant``."""
    return click.option(
        "--batch-invariant",
        is_flag=True,
        help="Serve all batches of a spec by kernels of one numerics class, so that a sequence's outputs are "
        "the same bits in whatever batch. The report shows what that costs.",
    )(function)


def store_option(function: Function) -> Function:
    """``--store``."""
    return click.option(
        "--store",
        callback=store_location,
        default=str(STORE),
        show_default=True,
        metavar="PATH|URL",
        help="Where every measurement is kept at once, a file or a database; the same store resumes.",
    )(function)


def output_option(function: Function) -> Function:
    """``--output``."""
    return click.option(
        "--output",
        type=PATH,
        default=OUTPUT,
        show_default=True,
        metavar="DIR",
        help="Folder for kernels and dispatch tables.",
    )(function)


def result_options(function: Function) -> Function:
    """How the result is shown."""
    return _stack(
        click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document."),
        click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
    )(function)


def selected_models(
    model_names: Sequence[str],
    hf_config: Path | None,
    heads: int | None,
    head_dim: int | None,
    state_size: int | None,
    groups: int | None,
    family: str | None = None,
) -> tuple[Model, ...]:
    """The layers that the options name; the default models where they name none.

    Raises:
        UsageError: An unknown model, an unusable config, a shape that is only given in part, or one beside a
            model or config.
    """
    sizes = {"--heads": heads, "--head-dim": head_dim, "--state-size": state_size}
    shape = {**sizes, "--groups": groups, "--family": family}
    given = ", ".join(option for option, value in shape.items() if value is not None)
    missing = ", ".join(option for option, value in sizes.items() if value is None)
    if model_names or hf_config is not None:
        named = "--model" if model_names else "--hf-config"
        if given:
            raise UsageError(
                f"{given} beside {named}, which says the whole shape",
                where=given,
                hint=f"leave out {given}; for another shape leave out {named}, and give all of it by options",
            )
        chosen = [models.find(name) for name in model_names]
        chosen += [] if hf_config is None else [models.from_hf_config(hf_config)]
        return tuple(dict.fromkeys(chosen))
    if not given:
        return tuple(models.find(name) for name in models.DEFAULT_MODELS)
    if heads is None or head_dim is None or state_size is None:
        raise UsageError(
            f"the shape is incomplete: {missing} missing",
            where=given,
            hint=f"add {missing}, or name a --model in place of {given}",
        )
    family = family or FAMILIES[0]
    name = f"{heads}x{head_dim}x{state_size}"
    name = name if family == FAMILIES[0] else f"{family} {name}"
    groups = 1 if groups is None else groups
    return (Model(name, heads, head_dim, state_size, groups=groups, family=family),)


def resolve_workload(
    gpu: Gpu,
    *,
    model_names: Sequence[str],
    hf_config: Path | None,
    heads: int | None,
    head_dim: int | None,
    state_size: int | None,
    groups: int | None,
    family: str | None,
    tp: Sequence[int] | None,
    drafts: Sequence[int],
    activation_dtype: Sequence[str] | None,
    state_dtype: Sequence[str] | None,
    ring_dtype: Sequence[str] | None,
    buffer_len: int,
    batch: Sequence[int] | None,
) -> tuple[tuple[request.Work, ...], tuple[str, ...], tuple[request.ConvWork, ...]]:
    """Cells, notes and convolutions that the options add up to; parameters carry the options' names."""
    chosen = selected_models(model_names, hf_config, heads, head_dim, state_size, groups, family)
    shared: dict[str, Any] = {"tensor_parallel": tp or (), "drafts": drafts, "batches": batch or ()}
    shared["activation_dtypes"] = activation_dtype or ()
    stored: dict[str, Any] = {"state_dtypes": state_dtype or (), "ring_dtypes": ring_dtype or ()}
    work, notes = request.resolve_work(chosen, gpu, window=buffer_len, **stored, **shared)
    return work, notes, request.resolve_convolutions(chosen, **shared)


def build_job(
    *,
    gpu: str | None,
    static: bool = False,
    budget: str | None = None,
    store: Path | str = STORE,
    output: Path = OUTPUT,
    batch_invariant: bool = False,
    **workload: Any,
) -> request.Job:
    """The request that all options add up to; parameters carry the options' names."""
    bound = request.Budget() if budget is None else request.Budget.parse(budget)
    target = request.resolve_target(gpu, static)
    work, notes, convolutions = resolve_workload(target.gpu, **workload)
    if target.measured:  # what is ranked statically are steps: nothing is known of what materialises states
        work = (*work, *request.materializing(work, target.gpu))
    asked = bool(workload.get("batch") or workload.get("tp"))
    return request.Job(target, work, bound, store, output, notes, batch_invariant, convolutions, asked)
