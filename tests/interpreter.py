"""Triton's interpreter with right bf16 arithmetic: import before a kernel's module.

The interpreter keeps bf16 in integers: its casts truncate, and sums and dots see the integers.
Here casts go through torch, and other operations through fp32. (triton 3.6 and 3.7)
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

TORCH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
BITS = {2: torch.uint16, 4: torch.uint32}
convert = interpreter._convert_float
Builder = interpreter.InterpreterBuilder
dot, binary = Builder.create_dot, Builder.binary_op


def _convert_float(data, source, target, rounding):
    if source not in TORCH or target not in TORCH:
        return convert(data, source, target, rounding)
    bits = torch.from_numpy(np.array(data, order="C"))  # a copy: may be read-only
    cast = bits.view(TORCH[source]).to(TORCH[target])
    return cast.view(BITS[cast.element_size()]).numpy()


def _wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _create_dot(self, a, b, acc, *rest):
    return dot(self, _wide(a), _wide(b), acc, *rest)


def _binary_op(self, a, b, op):
    if a.dtype.scalar != tl.bfloat16:
        return binary(self, a, b, op)
    out = binary(self, _wide(a), _wide(b), op)
    if out.data.dtype == np.bool_:
        return out
    data = _convert_float(out.data.astype(np.float32), tl.float32, tl.bfloat16, None)
    return interpreter.TensorHandle(data, tl.bfloat16)


interpreter._convert_float = _convert_float
Builder.create_dot, Builder.binary_op = _create_dot, _binary_op
