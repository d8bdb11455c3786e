"""Data records of one training step, in the order in which they are created.

    Prompt -> Completion -> Sample -> PackedBatch -> LogProbs -> LossOutput

All records are frozen; use `dataclasses.replace` to change one. torch is imported where it is used, so that processes
which compute rewards start without it. Shapes: P prompt tokens, R response tokens, L = P + R tokens of one sample, T
tokens of one pack, N segments of one pack, M loss tokens of one pack, [] a scalar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from fsdptrain.config.algorithm import AlgorithmConfig as LossConfig  # what losses read of the configuration
from fsdptrain.errors import RolloutError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fsdptrain.config import RolloutConfig
    from fsdptrain.data.packing.prefixes import SharedPrefixes

FinishReason = Literal["stop", "length"]
Metrics = dict[str, float]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
NO_ROUTE = -1  # in `routes`: no experts in this layer, or routing unknown; the model routes the token itself


@dataclass(frozen=True)
class Images:
    """Processed images of one prompt, or of all sequences of a pack in order."""

    inputs: Mapping[str, Tensor]  # by model argument name; rows follow the order of the images
    token_types: Tensor  # [P], or [T] for a pack, i64: 1 at image placeholder tokens, else 0

    def map(self, change: Callable[[Tensor], Tensor]) -> Images:
        """Apply `change` to every tensor."""
        return Images({name: change(x) for name, x in self.inputs.items()}, change(self.token_types))


class Segment(NamedTuple):
    """Token sequence with the images it contains."""

    token_ids: list[int]
    images: Images | None = None


@dataclass(frozen=True)
class Prompt:
    """Tokenized prompt. The engine receives exactly `token_ids`."""

    id: str  # unique within its data set and stable between runs
    token_ids: list[int]  # (P,)
    text: str  # decoded `token_ids`; for display only, never tokenized again
    label: Any = None  # reference answer, in the format that the reward expects
    metadata: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # per-prompt response limit; applies if below the limit in SamplingParams
    images: Images | None = field(default=None, compare=False, repr=False)
    source: str | Sequence[Message] = field(default="", compare=False, repr=False)  # as in the data, for agents
    eval_set: str = ""  # that has separate rewards

    @property
    def response_prefix(self) -> str:
        """The beginning of the response that the chat template wrote: `<think>`, or an empty thought, or nothing."""
        prefix = re.search(r"<think>\s*(?:</think>\s*)?\Z", self.text)
        return prefix[0] if prefix else ""


@dataclass(frozen=True)
class Turn:
    """Reply of an environment to a model response."""

    observation: str | Sequence[Message] = ""  # next model input; a string becomes a user message
    done: bool = False  # the episode ends; the observation is discarded
    reward: float | Mapping[str, float] | None = None  # summed over the episode; None: no reward


@dataclass(frozen=True)
class Episode:
    """Finished conversation. Reward functions read it from `prompt.metadata["episode"]`."""

    messages: Sequence[Message]  # messages after the prompt: model responses and observations
    reward: Mapping[str, float] | None  # environment reward: named parts and "reward"; None: no reward given
    done: bool  # ended by the environment, not by a limit


@dataclass(frozen=True)
class Truncation:
    """Options of truncated sampling. The defaults keep the whole vocabulary."""

    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """Return the truncation that the engine uses in training."""
        return cls(rollout.top_p, rollout.top_k or -1, rollout.min_p)

    def __bool__(self) -> bool:
        return self != UNTRUNCATED


UNTRUNCATED = Truncation()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `seed` with the prompt and sample ids determines every draw."""

    num_samples: int  # completions per prompt
    max_tokens: int  # response limit [tokens]
    temperature: float = 1.0  # 0.0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's
    stop: tuple[str, ...] = ()  # texts that end a response and belong to it
    seed: int = 0
    with_routes: bool = False  # record the experts that each token was routed to

    def limit_of(self, prompt: Prompt) -> int:
        """Return the response limit for `prompt`. [tokens]"""
        return self.max_tokens if prompt.max_tokens is None else min(self.max_tokens, prompt.max_tokens)


@dataclass(frozen=True)
class Completion:
    """One response of the engine."""

    prompt_id: str
    token_ids: list[int]  # (R,) includes the stop token, if one was sampled
    logprobs: list[float]  # (R,) under the sampling distribution, after temperature and truncation
    finish_reason: FinishReason
    policy_version: int  # weight version of the first token
    routes: Tensor | None = field(default=None, compare=False, repr=False)
    """[P + R - 1, layers, k] i16 on the CPU: experts of each token except the last, which the engine never processed"""
    versions: list[int] | None = None  # (R,) per-token versions, if the weights changed midway; None: all equal

    def __post_init__(self) -> None:
        if not math.isfinite(sum(self.logprobs)) and not all(map(math.isfinite, self.logprobs)):
            logprob = next(x for x in self.logprobs if not math.isfinite(x))
            raise RolloutError(
                f"--rollout-engine: a sampled token of prompt {self.prompt_id!r} has the logprob {logprob}; an engine "
                "must return logprobs of the distribution that it sampled from"
            )

    @property
    def token_versions(self) -> list[int]:
        """Return the weight version of each token. (R,)"""
        return self.versions or [self.policy_version] * len(self.token_ids)


@dataclass(frozen=True)
class Sample:
    """One trainable sequence. A multi-turn sample has multiple runs of False in `loss_mask`."""

    group_id: str  # shared by all samples of one prompt
    token_ids: list[int]  # (L,)
    loss_mask: list[bool]  # (L,) True for tokens generated by the model
    rollout_logprobs: list[float]  # (L,) 0.0 where loss_mask is False
    reward: float | None = None  # None: scoring failed
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name
    advantage: float = 0.0
    policy_version: int = 0  # weight version of the first generated token
    versions: list[int] | None = None  # (L,) per token, if they differ; only generated tokens are read
    truncated: bool = False
    routes: Tensor | None = field(default=None, compare=False, repr=False)  # [L, layers, k] i16 on the CPU
    error: str | None = None  # of its episode; it may show a secret, so it stays on this machine
    token_weights: list[float] | None = None  # (L,) in a supervised loss, 0.0 where loss_mask is False; None: all 1
    others: tuple[Sample, ...] = ()  # further sequences of the same episode, which share its reward and advantage

    @property
    def sequences(self) -> tuple[Sample, ...]:
        return (self, *self.others)

    @property
    def num_generated(self) -> int:
        """Tokens that the model generated, in all sequences."""
        return sum(sum(sequence.loss_mask) for sequence in self.sequences)

    @property
    def is_cut(self) -> bool:
        """Whether any sequence hit a limit."""
        return any(sequence.truncated for sequence in self.sequences)


@dataclass(frozen=True)
class PackedBatch:
    """Whole samples packed into one row.

    [T] fields at index t refer to `labels[t]`, the token after `input_ids[t]`. Only `position_ids` and `routes` refer
    to `input_ids[t]`. The last position of a segment has no next token: its label is 0 and its mask is False.
    `loss_weights` include the global denominator of the optimizer step, so losses are summed over packs and ranks
    without further division.
    """

    input_ids: Tensor  # [T] i64
    labels: Tensor  # [T] i64
    position_ids: Tensor  # [T] i64, starts at 0 in each segment
    cu_seqlens: Tensor  # [N+1] i32
    seqlens: tuple[int, ...]  # (N,) segment lengths on the host; reading them does not synchronize with the device
    loss_mask: Tensor  # [T] bool
    loss_positions: Tensor  # [M] i64, indices where loss_mask is True; [0] if there are none, so M >= 1
    loss_places: np.ndarray  # (M,) copy of loss_positions on the host
    loss_weights: Tensor  # [T] f32
    advantages: Tensor  # [T] f32
    rollout_logprobs: Tensor  # [T] f32
    num_loss_tokens: int  # loss tokens of the optimizer step over all ranks; 0: no update
    old_logprobs: Tensor | None = None  # [T] f32; None: strictly on-policy, the current logprobs are used
    ref_logprobs: Tensor | None = None  # [T] f32
    routes: Tensor | None = None  # [T, layers, k] i16, experts to replay; NO_ROUTE or None: the model routes itself
    images: Images | None = None  # images of all sequences
    shared: SharedPrefixes | None = None  # None: every segment is computed in full
    num_skipped_tokens: int = 0  # of `num_loss_tokens`, those in no pack: their advantage is 0
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # of features, by name

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_trained_tokens(self) -> int:
        """Loss tokens in the packs of the optimizer step over all ranks: the denominator of metrics."""
        return self.num_loss_tokens - self.num_skipped_tokens

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlens)

    def to(self, device: torch.device) -> PackedBatch:
        """Copy the batch to `device`. The copy does not block if the batch is in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        changed: dict[str, Any] = {k: change(v) for k, v in tensors_of(self).items()}
        images = None if self.images is None else self.images.map(change)
        shared = None if self.shared is None else self.shared.map(change)
        extras = {name: change(tensor) for name, tensor in self.extras.items()}
        return replace(self, images=images, shared=shared, extras=extras, **changed)


def tensors_of(record: object) -> dict[str, Tensor]:
    """Return the fields of `record` that are tensors."""
    from torch import Tensor

    return {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}


def positions_of(loss_mask: Tensor) -> Tensor:
    """Return `PackedBatch.loss_positions` [M] for a mask [T] on the CPU."""
    import torch

    return loss_mask.nonzero()[:, 0] if loss_mask.any() else torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of `labels` under the model, at the rollout temperature."""

    values: Tensor  # [T] f32, with gradient during training
    entropy: Tensor | None = None  # [T] f32, of the full next-token distribution [nats]; None: not computed
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # outputs of features, by name

    def for_loss(self, config: LossConfig) -> LogProbs:
        """Detach the entropy if it is only a metric."""
        if config.entropy_coef or self.entropy is None:
            return self
        return replace(self, entropy=self.entropy.detach())


@dataclass(frozen=True)
class LossOutput:
    """Loss and metrics. Metrics whose names end in `_max` are reduced by maximum, all others by sum."""

    loss: Tensor  # [] sum over this pack, weighted by `loss_weights`
    metrics: Mapping[str, Tensor]  # name -> [] detached, already divided by `num_trained_tokens`
