"""Protocols of rollout engines, training backends, rewards, environments, losses and loggers.

Protocols are structural: implementations need no base class. All methods of engines and backends are collective unless
documented otherwise. All ranks call them in the same order, and the implementation decides which ranks act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fsdptrain.types import (
    Completion,
    LogProbs,
    LossConfig,
    LossOutput,
    Metrics,
    PackedBatch,
    Prompt,
    SamplingParams,
    Turn,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from fsdptrain.enabled_features import Features
    from fsdptrain.model.probes.kernels import Kernel
    from fsdptrain.model.probes.layout import LayoutProbe

Naming = Literal["hub", "module"]
Loss = Callable[[PackedBatch, LogProbs, LossConfig], LossOutput]
ModelRole = Literal["policy", "reference"]
ForwardRole = Literal["train", "policy", "reference"]  # what logprobs are for: a loss, or scores of the policy, ...


class RolloutEngine(Protocol):
    """Generator of completions. Each rank passes its shard of the prompts and gets the completions of that shard."""

    weight_naming: Naming  # weight names that `update_weights` expects: checkpoint names or module names

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Return `num_samples` completions for each prompt, in prompt order.

        An engine may stop at a prompt's `max_tokens` and at `sampling.stop`; the caller truncates longer completions.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load the full tensors of `weights`. Every rank must exhaust the iterator."""

    def sleep(self) -> None:
        """Free device memory until `wake_up`. No-op if already asleep."""

    def wake_up(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class CheckedEngine(RolloutEngine, Protocol):
    """Additional methods that --verify-weight-sync needs; a custom engine may leave them out. Not collective."""

    def expect_checksums(self) -> None:
        """The next update will be verified."""

    def checksums(self) -> Mapping[str, Mapping[str, int]]:
        """`checksum` (rollout/weight_sync/checksum.py) of the tensors that the last update loaded, by their names, for
        each copy of the model that this rank reads."""
        ...


class TrainBackend(Protocol):
    """Owner of the policy, its optimizer and the reference model."""

    compute_dtype: torch.dtype
    layout_probe: LayoutProbe
    features: Features  # attached to the policy

    @property
    def model(self) -> PreTrainedModel:
        """The transformers architecture. It may be on the meta device, with the weights elsewhere."""
        ...

    @property
    def lines(self) -> list[str]: ...  # of the log, that describe the backend

    def kernels(self) -> list[Kernel]: ...

    def compute_logprobs(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        """Compute log-probabilities without gradient. Returns one record per batch, on the CPU."""
        ...

    def train_step(self, batches: Sequence[PackedBatch], loss: Loss, config: LossConfig) -> Metrics:
        """Run one optimizer step over the packs of this rank. Every rank passes the same number of packs."""
        ...

    def hf_weights(self, naming: Naming = "hub") -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors in the compute dtype, layer by layer, on the device. Every rank gets every tensor."""
        ...

    def save(self, directory: Path, step: int) -> Future[Any] | None:
        """Write a checkpoint. Returns the write of its shards if it continues in a thread."""
        ...

    def load(self, directory: Path) -> int:
        """Load a checkpoint and return its step. Raises CheckpointError instead of silently starting over."""
        ...

    def export(self, target: Path) -> None:
        """Write the policy as a Hugging Face folder."""

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move all state to the host until `onload`, to free memory for an engine on the same device (--offload-train).

        With `keep_weights`, the state that `hf_weights` and `compute_logprobs` need stays on the device.
        """

    def onload(self) -> None:
        """Move the state back to the device. No-op if nothing was moved."""


class RewardFunction(Protocol):
    """Reward of one sample. rewards/calls.py lists the other forms: async, and with lists of samples."""

    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, float] | None: ...


class Environment(Protocol):
    """Environment of a multi-turn conversation. One object serves all episodes, from multiple threads.

    For the optional methods, see docs/environments.md.
    """

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Start an episode and return its state, any object. `seed` is the same for all samples of a prompt."""
        ...

    def step(self, state: Any, response: str) -> Turn:
        """Reply to `response`. Called after each model response, including truncated ones."""
        ...


class Logger(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None: ...
    def close(self) -> None: ...
