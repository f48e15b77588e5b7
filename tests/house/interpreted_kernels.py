"""A kernel for the interpreter; imported only in its worker."""

import triton
import triton.language as tl


@triton.jit
def double(source_ptr, out_ptr, offset, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + index, mask=index < count, other=0.0)
    tl.store(out_ptr + index, 2.0 * value + offset, mask=index < count)


@triton.jit
def halved(value):
    return value * tl.full([1], 0.5, tl.float32)


@triton.jit
def halve_and_fill(source, out, count, BLOCK: tl.constexpr):
    """Calls a function of this file and, by ``tl.zeros``, one of the language's own."""
    i = tl.arange(0, BLOCK)
    value = halved(tl.load(source + i, mask=i < count, other=0.0))
    tl.store(out + i, value + tl.zeros([BLOCK], tl.float32), mask=i < count)
