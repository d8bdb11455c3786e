"""Custom losses, e.g. for `--loss tests.e2e.losses:doubled`."""

import sys
from dataclasses import replace

from fsdptrain.algo.losses import LOSSES
from fsdptrain.types import LogProbs, LossConfig, LossOutput, PackedBatch


def doubled(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, loss=2 * output.loss, metrics={**output.metrics, "policy/doubled": output.loss.detach()})


def not_finite(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    output = LOSSES["reinforce"](batch, logprobs, config)
    return replace(output, loss=output.loss * float("nan"))


def exits(batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput:
    sys.exit(0)
