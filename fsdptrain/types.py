"""The records that flow through a step, in the order in which they are made.

    Prompt -> Completion -> Sample -> PackedBatch -> LogProbs -> LossOutput

All are frozen: make a new one with `dataclasses.replace`. Shapes: P prompt tokens, R response tokens, L = P + R tokens
of one sample, T tokens of one pack, N segments of one pack, M loss tokens of one pack, [] a scalar.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
ChecksumKind = Literal["bits", "values", "multiset"]  # models.checksum says what each depends on
Metrics = dict[str, float]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
NO_ROUTE = -1  # in routes: no experts in this layer, or none known, so that the model chooses itself


@dataclass(frozen=True)
class Images:
    """The images of one prompt, or of all sequences of a pack in their order, as the processor made them."""

    inputs: Mapping[str, Tensor]  # by the names of the model's arguments; rows in the order of the images
    token_types: Tensor  # [P], of a pack [T], i64: 1 where the place of an image is, else 0

    def map(self, change: Callable[[Tensor], Tensor]) -> "Images":
        """With `change` of every tensor."""
        return Images({name: change(x) for name, x in self.inputs.items()}, change(self.token_types))


def join_images(parts: Sequence[tuple[Images | None, int]]) -> Images | None:
    """Of sequences in a row, each (the images of its prompt, its length); None where no sequence has any."""
    found = [images for images, _ in parts if images is not None]
    if not found:
        return None
    types = torch.zeros(sum(length for _, length in parts), dtype=torch.int64)
    start = 0
    for images, length in parts:
        if images is not None:
            types[start : start + len(images.token_types)] = images.token_types
        start += length
    return Images({name: torch.cat([x.inputs[name] for x in found]) for name in found[0].inputs}, types)


class Segment(NamedTuple):
    """A sequence of tokens with the images that it shows."""

    token_ids: list[int]
    images: Images | None = None


@dataclass(frozen=True)
class Prompt:
    """One question, already tokenised: what the engine sees is exactly `token_ids`."""

    id: str  # unique within its data set, and stable between runs
    token_ids: list[int]  # (P,)
    text: str  # what `token_ids` decode to; shown to people, never tokenised again
    label: Any = None  # the reference answer, in whatever form the reward understands
    metadata: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # longest response to this prompt, where that is less than the sampling's
    images: Images | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Turn:
    """What an environment answers to a response of the model."""

    observation: str | Sequence[Message] = ""  # what the model reads next; a text is a message of the user
    done: bool = False  # the episode ends here, and the observation is shown to nobody
    reward: float | Mapping[str, float] | None = None  # added up over the episode; None: not judged


@dataclass(frozen=True)
class Episode:
    """A conversation that has ended. A reward function finds it in `prompt.metadata["episode"]`."""

    messages: Sequence[Message]  # behind the prompt: responses of the model, and observations
    reward: Mapping[str, float] | None  # the environment's own: its parts by name, and "reward"; None: it gave none
    done: bool  # by the environment's word, not by a limit


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. `seed` and the ids of prompt and sample fix every draw."""

    num_samples: int  # completions for each prompt
    max_tokens: int  # longest response, in tokens
    temperature: float = 1.0  # 0.0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    with_routes: bool = False  # report the experts that each token took

    def limit_of(self, prompt: Prompt) -> int:
        """Longest response to `prompt`. [tokens]"""
        return self.max_tokens if prompt.max_tokens is None else min(self.max_tokens, prompt.max_tokens)


@dataclass(frozen=True)
class Completion:
    """One response of the engine."""

    prompt_id: str
    token_ids: list[int]  # (R,) with the stop token, when one was sampled
    logprobs: list[float]  # (R,) of the distribution that was sampled from: after temperature and truncation
    finish_reason: FinishReason
    policy_version: int  # of the weights that made its first token
    routes: Tensor | None = field(default=None, compare=False, repr=False)
    """[P + R - 1, layers, k] i16 on the CPU: the experts of each token but the last, which the engine never read"""
    versions: list[int] | None = None  # (R,) of each token, where new weights came in between; None: all the same

    @property
    def token_versions(self) -> list[int]:
        """(R,) the weights that made each token."""
        return self.versions or [self.policy_version] * len(self.token_ids)


@dataclass(frozen=True)
class Sample:
    """One trainable sequence. A multi-turn sample has several runs of False in `loss_mask`."""

    group_id: str  # samples of one prompt share it
    token_ids: list[int]  # (L,)
    loss_mask: list[bool]  # (L,) True where the model itself made the token
    rollout_logprobs: list[float]  # (L,) 0.0 where loss_mask is False
    reward: float | None = None  # None: could not be scored
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name
    advantage: float = 0.0
    policy_version: int = 0  # of the weights that made its first token
    versions: list[int] | None = (
        None  # (L,) of each token, where they differ; of the model's own tokens alone it counts
    )
    truncated: bool = False
    routes: Tensor | None = field(default=None, compare=False, repr=False)  # [L, layers, k] i16 on the CPU


@dataclass(frozen=True)
class SharedPrefixes:
    """Tokens with which several segments of a pack begin, and which the model computes once.

    The first segment of such is whole; those right behind it are computed from where they differ on. C <= T tokens are
    computed. Whatever is said of tokens is said of all T of them: a vector of `rows` stands for each.
    """

    segments: tuple[int, ...]  # (N,) the segment whose first tokens this one begins with; -1: it is whole
    lengths: tuple[int, ...]  # (N,) how many tokens; 0: none. A segment has one token of its own at least
    computed: Tensor  # [C] i64, where in the pack the computed tokens are
    rows: Tensor  # [T] i64, which computed token stands for each token of the pack
    cu_seqlens: Tensor  # [N+1] i32, of the computed tokens

    @classmethod
    def of(cls, segments: Sequence[int], lengths: Sequence[int], seqlens: Sequence[int]) -> "SharedPrefixes":
        """Where the computed tokens of segments of these lengths are."""
        whole, prefix = torch.tensor(seqlens), torch.tensor(lengths)
        own_ends = (whole - prefix).cumsum(0)
        own_starts = own_ends - (whole - prefix)
        starts = (whole.cumsum(0) - whole).repeat_interleave(whole)
        place = torch.arange(len(starts)) - starts  # of a token in its segment
        is_own = place >= prefix.repeat_interleave(whole)
        from_own = (own_starts - prefix).repeat_interleave(whole) + place
        from_first = own_starts[torch.tensor(segments)].repeat_interleave(whole) + place
        return cls(
            segments=tuple(segments),
            lengths=tuple(lengths),
            computed=is_own.nonzero()[:, 0],
            rows=torch.where(is_own, from_own, from_first),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), own_ends]).to(torch.int32),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "SharedPrefixes":
        """With `change` of every tensor."""
        return replace(self, **{k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)})

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return self.computed.numel()


@dataclass(frozen=True)
class PackedBatch:
    """Several whole samples in one row. Every [T] field at t speaks of `labels[t]`, the token after `input_ids[t]`;
    only `position_ids` and `routes` speak of `input_ids[t]` itself.

    The last position of a segment has no next token: its label is 0 and its mask False. `loss_weights` hold the global
    denominator of the optimizer step, so that losses are summed over packs and ranks and never divided again.
    """

    input_ids: Tensor  # [T] i64
    labels: Tensor  # [T] i64
    position_ids: Tensor  # [T] i64, from 0 in each segment
    cu_seqlens: Tensor  # [N+1] i32
    seqlens: tuple[int, ...]  # (N,) the same on the host: reading it never waits for a device
    loss_mask: Tensor  # [T] bool
    loss_positions: Tensor  # [M] i64, where loss_mask is True; [0] where it is True nowhere, so that M >= 1
    loss_places: np.ndarray  # (M,) the same on the host
    loss_weights: Tensor  # [T] f32
    advantages: Tensor  # [T] f32
    rollout_logprobs: Tensor  # [T] f32
    num_loss_tokens: int  # loss tokens of the whole optimizer step, over every rank: the denominator of metrics
    old_logprobs: Tensor | None = None  # [T] f32; None: strictly on-policy, the current logprobs are the old ones
    ref_logprobs: Tensor | None = None  # [T] f32
    routes: Tensor | None = None  # [T, layers, k] i16, experts to take; NO_ROUTE, or None: the model chooses
    images: Images | None = None  # of all its sequences
    shared: SharedPrefixes | None = None  # None: each segment is computed whole

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlens)

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on `device`; from pinned memory the copy does not block."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PackedBatch":
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        changed: dict[str, Any] = {k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)}
        images = None if self.images is None else self.images.map(change)
        return replace(self, images=images, shared=None if self.shared is None else self.shared.map(change), **changed)


def positions_of(loss_mask: Tensor) -> Tensor:
    """`PackedBatch.loss_positions` [M] of a mask [T] on the CPU."""
    return loss_mask.nonzero()[:, 0] if loss_mask.any() else torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of `labels` under the model, at the temperature of the rollout."""

    values: Tensor  # [T] f32, with gradient while training
    entropy: Tensor | None = None  # [T] f32 of the whole next-token distribution, in nats
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # results of features, by name

    def for_loss(self, config: "LossConfig") -> "LogProbs":
        """Without the gradient of the entropy where it is only a metric."""
        if config.entropy_coef or self.entropy is None:
            return self
        return replace(self, entropy=self.entropy.detach())


@dataclass(frozen=True)
class LossOutput:
    """A loss and what to log of it. Names that end in `_max` are reduced by maximum, all others by sum."""

    loss: Tensor  # [] a sum over this pack, weighted by `loss_weights`
    metrics: Mapping[str, Tensor]  # name -> [] detached; already divided by `num_loss_tokens`


@dataclass(frozen=True)
class LossConfig:
    """What a loss function needs to know of the configuration."""

    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    is_cap_high: float = 5.0  # absolute
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    ipo_kl_coef: float = 1e-3
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    mismatch_correction: str = "none"
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0
    mismatch_rejection: str = "none"
    mismatch_rejection_max: float = 0.0
    use_rollout_logprobs: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
