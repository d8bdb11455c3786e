"""Option of the kernels of the package liger-kernel."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, Excludes, Package
from fsdptrain.config.section import Section


class LigerConfig(Section):
    """Kernels of liger-kernel."""

    NAME = "liger"
    ON_RESUME = NEUTRAL

    liger: Annotated[
        bool,
        Package("liger_kernel", "liger"),
        Package("triton", "liger"),
        Excludes("compile", reason="with --compile, which fuses the same operations: leave one of them out"),
        Excludes("tensor_parallel_size>1", "expert_parallel_size>1", "image_key"),
        FSDP_ONLY,
    ] = False
    """Compute norms and gated MLPs with the Triton kernels of liger-kernel, after comparing logprobs and gradients of
    the loaded model with and without them. Not run on a GPU yet."""
