"""The gate without a GPU: structures run in Triton's interpreter, on small shapes.

The interpreter changes every kernel of its process and must be chosen before triton is imported, so
the check has a process of its own: ``python -m replayssm_tune.tuner.interpreted`` reads pairs of spec
and structure keys from one JSON file and writes to another, line by line as it checks them, why each
fails, or "".
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from inspect import ismodule
from pathlib import Path
from typing import Any, Final

from ..codegen.cache import rendered
from ..codegen.files import emit_error
from ..codegen.space import broken_constraint, folds
from ..runtime.abi import next_power_of_two, state_block
from ..runtime.errors import ToolchainError
from ..runtime.plan import Plan, Structure, Tile, Variant
from ..runtime.spec import Spec

TIMEOUT_S: Final = 300.0
"""Wall time of the whole check; a structure takes a second or two."""

_LOOK_S: Final = 0.25
"""Pause between two looks at what has been answered."""


def small_spec(spec: Spec) -> Spec:
    """A spec of the same kind that the interpreter runs in a second: fp16 stands in for bf16.

    The interpreter's bf16 is wrong by design. Sizes that are no powers of two stay none: 24 rows end
    within a block of 16, and are three whole blocks of 8. Neither is the number of tokens.
    """

    def narrow(dtype: str) -> str:
        return "fp16" if dtype == "bf16" else dtype

    return dataclasses.replace(
        spec,
        head_dim=16 if spec.head_dim & (spec.head_dim - 1) == 0 else 24,
        state_size=32 if spec.state_size & (spec.state_size - 1) == 0 else 24,
        heads_per_group=min(2, spec.heads_per_group),
        window=min(4, spec.window),
        num_tokens=min(3, spec.num_tokens),
        activation_dtype=narrow(spec.activation_dtype),
        state_dtype=narrow(spec.state_dtype),
        ring_dtype=narrow(spec.ring_dtype),
    )


def small_plan(spec: Spec, structure: Structure) -> Plan:
    """A plan of ``structure`` with a tile that divides work of ``spec`` several ways, and its partner."""
    variant = small_variant(spec, structure)
    if structure.role == "nonflush":
        return Plan((variant, small_variant(spec, Structure("flush"))))
    if structure.role == "flush":
        return Plan((small_variant(spec, Structure("nonflush")), variant))
    return Plan((variant,))


def small_variant(spec: Spec, structure: Structure) -> Variant:
    """A legal point of ``structure``: several blocks, chunks and heads where it can have them."""
    whole = state_block(spec)
    half = max(1, whole // 2)
    # A dot takes no fewer rows than 16; a loop over tiles wants more than one of them.
    rows = 8 if structure.loop == "tiles" and structure.readout == "elementwise" else 16
    if structure.coefficients == "prologue" and structure.loop == "heads":
        rows = max(rows, next_power_of_two(spec.head_dim))
    for heads in (min(2, spec.heads_per_group), 1):
        for block_n in (half, whole):
            for fold in (half, whole) if folds(structure) else (0,):
                variant = Variant(structure, Tile(rows, block_n, fold, heads))
                if not broken_constraint(spec, variant):
                    return variant
    return Variant(structure, Tile(rows, whole, whole if folds(structure) else 0))


class InterpretedGate:
    """Checks structures in a process of its own, from entering the block until :meth:`failures`.

    Args:
        structures: Pairs of spec and structure; those that come down to the same small case run once.
        modules: Folder for rendered modules.

    Raises:
        EmitError: Nothing can be written there.
    """

    def __init__(self, structures: Iterable[tuple[Spec, Structure]], modules: Path) -> None:
        self._cases = {pair: (small_spec(pair[0]).key, pair[1].key) for pair in structures}
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        try:
            modules.parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="interpreted-", dir=modules.parent)
        except OSError as error:
            raise emit_error(modules.parent, error) from error
        names = ("request.json", "answers.jsonl", "errors.txt")
        self._request, self._answers, self._errors = (Path(self._folder.name) / name for name in names)

    def __enter__(self) -> InterpretedGate:
        request = {"modules": str(self._modules), "cases": sorted(set(self._cases.values()))}
        self._request.write_text(json.dumps(request), encoding="utf-8")
        with open(self._errors, "w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.interpreted", self._request, self._answers],
                stdin=subprocess.PIPE,  # ends when this process does, see _end_with_caller
                stdout=errors,
                stderr=errors,
                env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._folder.cleanup()

    def failures(
        self, told: Callable[[int], None] = lambda done: None
    ) -> Mapping[tuple[Spec, Structure], str]:
        """Reasons of the pairs that are numerically wrong; waits for the process.

        Args:
            told: Told of how many pairs are checked, at once and whenever there are more.

        Raises:
            ToolchainError: The interpreter died or took too long.
        """
        code = self._wait(told)
        if code:
            last = self._errors.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["no message"]
            raise ToolchainError(
                f"Triton's interpreter ended with code {code}: {last[0]}",
                hint="the versions of triton and numpy must fit each other",
            )
        reasons = self._answered()
        lost = sum(case not in reasons for case in self._cases.values())
        if lost:
            raise ToolchainError(
                f"the answer of Triton's interpreter is gone for {lost} of {len(self._cases)} structures",
                where=str(self._answers),
                hint="run the same command again; what was compiled is kept",
            )
        return {pair: reasons[case] for pair, case in self._cases.items() if reasons[case]}

    def _wait(self, told: Callable[[int], None]) -> int:
        """Exit code of the process, telling of what it has checked meanwhile."""
        assert self._process is not None
        deadline_s = time.monotonic() + TIMEOUT_S
        before = -1
        while True:
            code = self._process.poll()
            answered = self._answered()
            done = sum(case in answered for case in self._cases.values())
            if done != before:
                told(done)
                before = done
            if code is not None:
                return code
            if time.monotonic() >= deadline_s:
                raise ToolchainError(
                    f"checking numerics in Triton's interpreter took more than {TIMEOUT_S:g} s",
                    hint="run it on a machine that is less busy",
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)

    def _answered(self) -> dict[tuple[str, str], str]:
        """Reasons of the cases that are checked so far, "" where there is none to complain of."""
        try:
            text = self._answers.read_text(encoding="utf-8")
        except OSError:
            return {}  # not begun, or lost, which shows at the end
        whole = text[: text.rfind("\n") + 1]  # the last line may be half written
        return {(spec, structure): reason for spec, structure, reason in map(json.loads, whole.splitlines())}


def _path() -> str:
    """Where the interpreter's process finds this package: where this one found it."""
    return os.pathsep.join(dict.fromkeys(entry for entry in sys.path if entry))


def check_case(spec: Spec, structure: Structure, modules: Path) -> str:
    """Reason why ``structure`` fails the gate on ``spec``, or "". Only in an interpreting process."""
    from .gate import Gate
    from .trajectory import Trajectory

    heads = 2 * spec.heads_per_group
    scene = Trajectory(spec, heads=heads, sequences=3, steps=6, padded_rows=1, null_slot=0)
    return Gate(scene, repeats=2).check(small_plan(spec, structure), rendered(modules)).reason


def lighten_interpreter() -> None:
    """Make Triton's interpreter leave out what takes half its time and finds nothing in small cases.

    It checks every sum and product of integers for overflow, and replaces the functions of its language
    anew at every call of a function from a kernel, though they are replaced already. Only in an interpreting
    process; an interpreter of another make is left as it is, and one that is light already.
    """
    from triton.runtime import interpreter

    known: Any = interpreter
    builder: Any = getattr(known, "interpreter_builder", None)
    if hasattr(builder, "options") and hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    names = ("_LangPatchScope", "_patch_lang", "tl")
    found: list[Any] = [getattr(known, name, None) for name in names]
    scope_type, patch, triton_language = found
    if None in found or hasattr(patch, "light"):
        return
    language = {triton_language, triton_language.core}
    replaced: set[object] = set()
    """Modules of the language whose functions are replaced, in the launch under way."""

    class LaunchScope(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def patch_once(function: Callable[..., object]) -> object:
        used = {value for value in function.__globals__.values() if ismodule(value) and value in language}
        if replaced >= used:
            return scope_type()
        known._LangPatchScope = scope_type if replaced else LaunchScope
        replaced.update(used)
        return patch(function)

    patch_once.light = True  # type: ignore[attr-defined]
    known._patch_lang = patch_once


def _end_with_caller() -> None:
    """End this process once the caller is gone, killed or not: its end of stdin closes with it."""

    def watch() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock must be free when this process ends
        os._exit(1)

    threading.Thread(target=watch, name="caller", daemon=True).start()


def _main() -> None:
    _end_with_caller()
    lighten_interpreter()
    import torch

    torch.set_num_threads(1)  # threads cost more than these sizes gain
    asked, answered = map(Path, sys.argv[1:])
    request = json.loads(asked.read_text(encoding="utf-8"))
    with answered.open("w", encoding="utf-8") as answers:
        for spec_key, structure_key in request["cases"]:
            spec, structure = Spec.parse(spec_key), Structure(*structure_key.split("."))
            reason = check_case(spec, structure, Path(request["modules"]))
            print(json.dumps((spec_key, structure_key, reason)), file=answers, flush=True)


if __name__ == "__main__":
    _main()
