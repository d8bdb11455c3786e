"""Registry of losses. Each is one function: (batch, logprobs, config) -> LossOutput.

To add a loss, write a function that returns `policy_loss(...)` (fsdptrain.algo.objective), register it here, and list
the options that it reads in fsdptrain/config/presets.py. Alternatively, pass `--loss my_package.losses:mine`, which
needs neither.
"""

from collections.abc import Mapping

from fsdptrain.algo.clipped_losses import gmpo, grpo, gspo
from fsdptrain.algo.objective import total
from fsdptrain.algo.tokens import at_loss_tokens
from fsdptrain.algo.weighted_losses import cispo, dppo_kl, dppo_tv, ipo, reinforce, sapo
from fsdptrain.protocols import Loss
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch


def sft(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """Negative log-likelihood of the loss tokens, -l. Ignores advantages and rollout logprobs."""
    tokens = at_loss_tokens(batch, logprobs)
    return total(tokens, -tokens.logprobs, config, {})


LOSSES: Mapping[str, Loss] = {
    "grpo": grpo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "reinforce": reinforce,
    "sft": sft,
}
