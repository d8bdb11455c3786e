"""Split layers and experts of a model over ranks.

This runs before FSDP, on the meta model; FSDP then shards the parts. The modules stay stock and get a forward that
moves tokens, or parts of hidden states, between ranks.
"""

import logging
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from fsdptrain.features.model_parallel.plan import is_tied, split_plan, thin_split
from fsdptrain.model.structure import lm_head

log = logging.getLogger(__name__)


def split_model(model: PreTrainedModel, *, tensor: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Split `model` over `tensor` (if larger than one rank) and `experts`.

    Raises ConfigError if the model does not support the sizes.
    """
    plan = split_plan(model, tensor_size=tensor.size(), expert_size=1 if experts is None else experts.size())
    line = thin_split(model, plan, tensor_size=tensor.size())
    if line and dist.get_rank() == 0:
        log.warning("%s", line)
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if tensor.size() > 1:
        tied = is_tied(model)
        apply_tensor_parallelism(model, tensor, plan.tensor)
        if tied:
            lm_head(model).weight = cast(nn.Module, model.get_input_embeddings()).weight
    if experts is not None:
        from fsdptrain.features.model_parallel.dispatch import register_dispatch
        from fsdptrain.features.model_parallel.shared_expert import overlap_shared_experts

        apply_expert_parallelism(model, experts, tensor, plan.experts, register_dispatch())
        overlap_shared_experts(model)
