"""The batch-invariant feature: one shape for every product, in the policy and in the embedded engine."""

from contextlib import AbstractContextManager

import torch.nn.functional as F
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, LogProbsFunction
from fsdptrain.features.batch_invariant.kernels import invariant
from fsdptrain.model.rows import Rows
from fsdptrain.types import PackedBatch


class BatchInvariantFeature(Feature):
    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what computes layers again outside of the forward pass, with other kernels."""
        for flat in ("gradient_checkpointing", "compile"):
            if config.value(flat):
                raise ConfigError(
                    f"--deterministic-mode does not work with {all_keys()[flat].flag} on a CPU: leave one of them out"
                )

    @property
    def lines(self) -> list[str]:
        return ["batch-invariant: linear layers, activations, and causal attention without windows and softcaps"]

    def around_forward(self, batch: PackedBatch, rows: Rows) -> AbstractContextManager[None]:
        return invariant()

    def around_generation(self) -> AbstractContextManager[None]:
        return invariant()

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        """Pad the rows to whole chunks, of which the head then computes nothing else."""

        def logprobs(
            hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_size: int, **options: object
        ) -> tuple[Tensor, Tensor | None]:
            count, more = len(hidden), -len(hidden) % chunk_size
            values, entropy = stock(
                F.pad(hidden, (0, 0, 0, more)), weight, F.pad(labels, (0, more)), chunk_size=chunk_size, **options
            )
            return values[:count], None if entropy is None else entropy[:count]

        return logprobs
