"""The model parallel feature: split layers and experts over ranks with the plans of transformers.

A parameter that stays whole between split matrices (the norm of a head) sees only the heads of one rank. Its gradients
must be summed over the tensor group, which the plan must declare. Without that, training is wrong without an error: the
copies of the ranks diverge. `verify` compares them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, LogProbsFunction
from fsdptrain.features.model_parallel.plan import split_model, split_plan_of
from fsdptrain.fsdp.expert_shards import is_split
from fsdptrain.fsdp.mesh import EXPERT, TENSOR, Meshes
from fsdptrain.model.loading.materialize import local_part
from fsdptrain.model.loading.meta import build_meta_model
from fsdptrain.model.probes.head import check_backward
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.vocab_parallel import vocab_parallel_logprobs


class ModelParallelFeature(Feature):
    cuts_parameters = True

    def __init__(self) -> None:
        self._tensor: DeviceMesh | None = None  # set if layers are split

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "ModelParallelFeature":
        trust = config.model.trust_remote_code
        model = build_meta_model(checkpoint, trust_remote_code=trust, attn_implementation="eager")
        with raise_on_all_ranks(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
            split_plan_of(model, config)
        return cls()

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        assert meshes.tensor is not None
        with raise_on_all_ranks(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
            split_model(model, tensor=meshes.tensor, experts=meshes.experts)
        self._tensor = meshes.tensor if meshes.tensor.size() > 1 else None

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        return partial(_logprobs, stock)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        if self._tensor is not None:
            look = partial(require_whole_gradients, model, self._tensor)
            check_backward(model, vocab_size=vocab_size, layout=probe.layout, look=look)


def _logprobs(stock: LogProbsFunction, hidden: Tensor, *, weight: Tensor, **options: Any) -> Any:
    """Call `stock`, or its vocabulary-parallel variant if the head is split over ranks."""
    if isinstance(weight, DTensor):
        return vocab_parallel_logprobs(hidden, weight=weight, **options)
    return stock(hidden, weight=weight, **options)


_DIFFERENT = 1e-2  # relative to the largest element: full gradients agree, while partial ones come from different heads
_NOISE = 1e-5  # relative to the largest gradient of all; smaller ones may be rounding, as for a bias that cancels


@torch.no_grad()
def require_whole_gradients(model: nn.Module, tensor: DeviceMesh) -> None:
    """Raise ConfigError on all ranks if a replicated parameter has a partial gradient.

    Collective. Call it after a backward pass over the same tokens on all ranks.
    """
    whole = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and not is_split(p, TENSOR, EXPERT)
    }
    if not whole:  # true on all ranks: the norms have no weights (OLMo), and all else is split
        return
    sizes = torch.stack([_difference(local_part(grad), tensor) for grad in whole.values()])
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    least = _NOISE * sizes[:, 1].max()
    wrong = (sizes[:, 0] > _DIFFERENT * sizes[:, 1]) & (sizes[:, 1] > least)
    names = [name for name, is_wrong in zip(whole, wrong.tolist(), strict=True) if is_wrong]
    with raise_on_all_ranks(ConfigError, "--tensor-parallel-size"):
        if names:
            raise ConfigError(
                f"--tensor-parallel-size {tensor.size()}: the plan of transformers leaves each process with a part of "
                f"the gradient of {names[0]} ({len(names)} parameters in all): remove it"
            )


def _difference(grad: Tensor, tensor: DeviceMesh) -> Tensor:
    """Return [2]: the largest distance from the mean over ranks, and the largest element."""
    if not grad.numel():  # empty on all ranks of the group
        return grad.new_zeros(2, dtype=torch.float32)
    mean = grad.float().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(mean, group=tensor.get_group())
    mean /= tensor.size()
    return torch.stack([(grad.float() - mean).abs().max(), grad.float().abs().max()])
