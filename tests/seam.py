"""Features attached to small models without a configuration."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fsdptrain.feature import Feature, Features
from fsdptrain.features.context_parallel.config import ContextParallelConfig
from fsdptrain.features.context_parallel.feature import ContextParallelFeature
from fsdptrain.features.context_parallel.recurrent import gather_around
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.moe.feature import MoEFeature
from fsdptrain.features.prefix_sharing.feature import PrefixSharingFeature
from fsdptrain.model.policy import install_policy_forward, policy_logprobs
from fsdptrain.types import LogProbs, PackedBatch


def context_parallel(group: UlyssesGroup, mixers: Sequence[nn.Module] = ()) -> ContextParallelFeature:
    """Tokens over `group`, gathered around `mixers`."""
    feature = ContextParallelFeature(ContextParallelConfig(context_parallel_size=group.size))
    feature.attach(group, [gather_around(mixer) for mixer in mixers])
    return feature


def prefix_sharing() -> Features:
    return Features([PrefixSharingFeature()])


def install_replay(model: PreTrainedModel, *, chunk_size: int = 64, more: Sequence[Feature] = ()) -> MoEFeature:
    """Install the policy's forward with router replay, and `more` features."""
    moe = MoEFeature(replay="scoring")
    moe.transform_model(model)
    install_policy_forward(model, chunk_size=chunk_size, features=Features([*more, moe]))
    return moe


def routed_logprobs(
    moe: MoEFeature, model: PreTrainedModel, batch: PackedBatch, *, with_routes: bool = False, **options: Any
) -> LogProbs:
    """`policy_logprobs`; with_routes: the experts that were chosen are in `extras["routes"]`."""
    with moe.around_scoring("policy") if with_routes else nullcontext():
        return policy_logprobs(model, batch, **options)
