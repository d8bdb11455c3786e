"""Small models with the forward pass of the policy and with features, without a configuration."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.enabled_features import Features
from fsdptrain.feature import Feature
from fsdptrain.features.moe.feature import MoEFeature
from fsdptrain.features.prefix_sharing.feature import PrefixSharingFeature
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.types import LogProbs, PackedBatch
from tests import zoo

CPU = torch.device("cpu")


def policy_model(name: str, chunk_size: int = 16, *, more: Sequence[Feature] = (), **changes: Any) -> PreTrainedModel:
    """A model of the zoo with the policy's forward and attention, prefix sharing, and `more` features."""
    register_attention()
    model = zoo.build(name, **changes)
    model.set_attn_implementation(SEGMENTS)
    install_policy_forward(model, chunk_size=chunk_size, features=Features([PrefixSharingFeature(), *more]))
    return model


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `loss` by parameter name, without those of earlier losses."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logprobs_and_gradients(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Tensor]:
    """Logprobs of a pack, under "", and by parameter the gradients of their sum with weights of their own."""
    values = policy_logprobs(model, batch, layout="packed").values
    return {"": values.detach()} | gradients(model, (values * (batch.position_ids + 1).sin()).sum())


def random_pack(lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    """A pack of random tokens of the zoo, with a loss on all that are predicted."""
    generator = torch.Generator().manual_seed(seed)
    segments = [torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return plain_batch(segments, device=CPU)


def install_replay(model: PreTrainedModel, *, chunk_size: int = 64, more: Sequence[Feature] = ()) -> MoEFeature:
    """Install the policy's forward with router replay, and `more` features."""
    moe = MoEFeature(replay="scoring")
    moe.transform_model(model)
    install_policy_forward(model, chunk_size=chunk_size, features=Features([*more, moe]))
    return moe


def routed_logprobs(
    model: PreTrainedModel, batch: PackedBatch, *, with_routes: bool = False, **options: Any
) -> LogProbs:
    """`policy_logprobs`; with_routes: the experts that were chosen are in `extras["routes"]`."""
    return policy_logprobs(model, batch, role="policy" if with_routes else "train", **options)
