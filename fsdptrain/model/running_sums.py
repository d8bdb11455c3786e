"""Running sums with deterministic kernels."""

import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128  # entries per block: the running sum of a block is one row of a matrix product


def running_sums(values: Tensor) -> Tensor:
    """Compute inclusive sums along the last dimension of `values` [R, N] f64.

    Uses blockwise products with a triangle of ones. torch.cumsum has no deterministic float kernel on CUDA and raises
    under --deterministic-mode.
    """
    num_rows, length = values.shape
    size = min(length, _BLOCK)
    triangle = values.new_ones(size, size).triu()
    if length <= _BLOCK:
        return values @ triangle
    blocks = F.pad(values, (0, -length % _BLOCK)).view(num_rows, -1, _BLOCK) @ triangle
    ends = running_sums(blocks[:, :, -1])
    blocks[:, 1:] += ends[:, :-1, None]
    return blocks.view(num_rows, -1)[:, :length]
