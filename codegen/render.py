"""Rendering: (spec, structure) to the source of one Triton module, deterministically."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.resources
import re

import jinja2

from ..runtime.abi import CONSTEXPRS, next_power_of_two, parameters, ring_block
from ..runtime.plan import Structure
from ..runtime.spec import Spec


@functools.cache
def _environment() -> jinja2.Environment:
    def load(name: str) -> str | None:
        resource = importlib.resources.files("replayssm_tune") / "templates" / name
        return resource.read_text(encoding="utf-8") if resource.is_file() else None

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def split_terms(spec: Spec) -> bool:
    """Whether the fold's dot splits weighted x into bf16 terms (B itself is exact in bf16).

    Other ring dtypes go through tf32x3, which is exact for fp16 and as good as fp32 for fp32.
    """
    return spec.ring_dtype == "bf16"


@functools.lru_cache(maxsize=4096)
def render(spec: Spec, structure: Structure) -> str:
    """Source of the module of ``structure`` for ``spec``.

    The same input gives the same bytes. The module defines ``step`` and, for precomputed
    coefficients, ``coefficients``; their parameters are those of :mod:`..runtime.abi`.
    """
    template = "native_step.py.jinja" if structure.role == "native" else "step.py.jinja"
    n_block = next_power_of_two(spec.state_size)
    source = (
        _environment()
        .get_template(template)
        .render(
            spec=spec,
            structure=structure,
            parameters=parameters(spec, structure),
            constexprs=CONSTEXPRS,
            n_block=n_block,
            ring_block=ring_block(spec),
            group_block=next_power_of_two(spec.heads_per_group),
            split_terms=split_terms(spec),
        )
    )
    return _tidy(source)


@functools.cache
def render_cursors() -> str:
    """Source of the cursor ops' module, the same for every spec: ``commit``, ``reset``, ``drained``."""
    return _tidy(_environment().get_template("cursors.py.jinja").render())


def module_digest(source: str) -> str:
    """Digest of a module's syntax tree: comments and layout do not count. 16 hex digits."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, (ast.Module, ast.FunctionDef))
            and isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def module_name(spec: Spec, structure: Structure) -> str:
    """File stem of the module in ``generated/kernels``: readable, unique, an identifier."""
    return re.sub(r"[^a-z0-9]+", "_", f"{spec.key}__{structure.key}".lower())


def _tidy(source: str) -> str:
    """Blank lines as the formatter wants them: two around functions, none inside bodies."""
    out: list[str] = []
    for line in (text.rstrip() for text in source.splitlines()):
        if line.startswith("@triton.jit"):
            while out and not out[-1]:
                out.pop()
            out += ["", ""]
        if line or (out and out[-1] and not out[-1].startswith((" ", "def ", "@"))):
            out.append(line)
    return "\n".join(out).strip() + "\n"
