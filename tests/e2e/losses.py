"""Custom losses, e.g. for `--loss tests.e2e.losses:doubled`."""

import sys
from dataclasses import replace

from fsdptrain.algo.losses import LOSSES
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch


def doubled(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, loss=2 * output.loss, metrics={**output.metrics, "policy/doubled": output.loss.detach()})


def counted(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    """The number of trained tokens of the step as a metric; metrics are sums over packs of values per token."""
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, metrics={**output.metrics, "policy/num_loss_tokens": batch.loss_mask.sum().float()})


def not_finite(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, loss=output.loss * float("nan"))


def exits(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    sys.exit(0)
