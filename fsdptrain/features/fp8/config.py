"""Option of computation in 8-bit floats."""

from typing import Annotated

from fsdptrain.config.rules import FSDP_ONLY, NOT_EXPORTED, TUNING, Excludes, Package
from fsdptrain.config.section import Section

_NOT_TESTED = Excludes("lora_rank", "liger", "fp16", "tensor_parallel_size>1", "expert_parallel_size>1")


class Fp8Config(Section):
    """Computation in 8-bit floats: docs/fp8.md."""

    NAME = "fp8"
    ON_RESUME = TUNING

    fp8: Annotated[bool, NOT_EXPORTED, _NOT_TESTED, FSDP_ONLY, Package("torchao", "torchao")] = False
    """Compute linear layers in 8-bit floats in the forward and backward pass, by torchao."""
