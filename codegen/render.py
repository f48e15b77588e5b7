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
            split_terms=split_terms(spec),
        )
    )
    return _tidy(source)


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
    lines = [line.rstrip() for line in source.splitlines()]
    tidy: list[str] = []
    for line in lines:
        if line or (tidy and tidy[-1] and not tidy[-1].endswith((":", "(", ","))):
            tidy.append(line)
    return _spread("\n".join(tidy))


def _spread(source: str) -> str:
    """Two blank lines before a top-level definition, none inside a body."""
    out: list[str] = []
    for line in source.splitlines():
        indented = line.startswith((" ", ")", "@", "def ")) or not line
        if not line and out and out[-1].startswith("    "):
            continue
        if line.startswith("@triton.jit"):
            while out and not out[-1]:
                out.pop()
            out += ["", ""]
        out.append(line)
        del indented
    return "\n".join(out).strip() + "\n"
