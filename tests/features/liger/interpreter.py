"""What Triton's interpreter lacks for the kernels of liger-kernel: arguments that are numbers, and libdevice."""

from typing import Any

import numpy as np
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter


def complete() -> None:
    """Patch the interpreter, once per process."""
    stock = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return stock(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # of the interpreter, while a kernel runs
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
