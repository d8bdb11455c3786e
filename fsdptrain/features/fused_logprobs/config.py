"""Option of the kernels that make the passes over the logits."""

from typing import Annotated, Literal

from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL
from fsdptrain.config.section import Section


class FusedLogprobsConfig(Section):
    """Kernels of the logprobs."""

    NAME = "fused_logprobs"
    ON_RESUME = NEUTRAL

    logprob_kernel: Annotated[Literal["auto", "triton", "eager"], FSDP_ONLY] = "auto"
    """What computes logprobs, entropy and their gradient from logits. `triton`: two fused kernels. `eager`: torch's
    operations. `auto`: the kernels on a GPU with Triton, after a comparison on that GPU, else `eager`."""

    def chosen(self, *, on_gpu: bool) -> bool:
        """Whether the kernels are to be tried."""
        return self.logprob_kernel == "triton" or (self.logprob_kernel == "auto" and on_gpu)
