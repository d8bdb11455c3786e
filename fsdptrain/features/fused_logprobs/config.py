"""Option of the kernels for the passes over the logits."""

from typing import TYPE_CHECKING, Annotated, Literal

from fsdptrain.config.checks import idle_reason
from fsdptrain.config.rules import FSDP_ONLY, NEUTRAL, IdleWith
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_SPLIT_HEAD = IdleWith("tensor_parallel_size>1", reason="a vocabulary that is split over ranks uses torch's operations")


class FusedLogprobsConfig(Section):
    """Kernels of the logprobs."""

    NAME = "fused_logprobs"
    ON_RESUME = NEUTRAL

    logprob_kernel: Annotated[Literal["auto", "triton", "eager"], _SPLIT_HEAD, FSDP_ONLY] = "auto"
    """Implementation of logprobs, entropy and their gradient from logits. `triton`: two fused kernels. `eager`: torch
    operations. `auto`: the kernels on a GPU with Triton if they agree with torch there, else `eager`."""

    def tries(self, config: "Config", *, on_gpu: bool) -> bool:
        """Return whether the run tries to use the kernels."""
        wanted = self.logprob_kernel == "triton" or (self.logprob_kernel == "auto" and on_gpu)
        return wanted and not idle_reason(config, "logprob_kernel")
