"""The model parallel feature: split layers and experts over ranks with the plans of transformers."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, ForwardPass, LogProbsFunction
from fsdptrain.features.meta import meta_model_of
from fsdptrain.features.model_parallel.gradient_check import require_whole_gradients
from fsdptrain.features.model_parallel.logprobs import vocab_parallel_logprobs
from fsdptrain.features.model_parallel.split import split_model
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.memory.grid import Grid
from fsdptrain.memory.pieces import Pieces
from fsdptrain.types import Metrics, PackedBatch

if TYPE_CHECKING:
    from fsdptrain.features.model_parallel.dispatch import Dispatches


class ModelParallelFeature(Feature):
    cuts_parameters = True

    def __init__(self) -> None:
        self._tensor: DeviceMesh | None = None  # set if layers are split
        self._dispatches: Dispatches | None = None  # set if experts are split

    @classmethod
    def check(cls, config: Config) -> None:
        model = meta_model_of(config)
        with raise_on_all_ranks(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
            Pieces(model, Grid.of(config, dist.get_world_size()))

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        assert meshes.tensor is not None
        with raise_on_all_ranks(ConfigError, "--tensor-parallel-size, --expert-parallel-size"):
            split_model(model, tensor=meshes.tensor, experts=meshes.experts)
        self._tensor = meshes.tensor if meshes.tensor.size() > 1 else None
        if meshes.experts is not None:
            from fsdptrain.features.model_parallel.dispatch import Dispatches  # needs a newer transformers

            self._dispatches = Dispatches(model)

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        return partial(_logprobs, stock)

    def check_gradients(self, model: PreTrainedModel) -> None:
        if self._tensor is not None:
            require_whole_gradients(model, self._tensor)

    def before_step(self, model: PreTrainedModel, batches: Sequence[PackedBatch], forward: ForwardPass) -> None:
        if self._dispatches is not None:
            self._dispatches.reset()

    def after_step(self, *, updated: bool) -> Metrics:
        return {} if self._dispatches is None else self._dispatches.metrics(platform.local_device())


def _logprobs(stock: LogProbsFunction, hidden: Tensor, *, weight: Tensor, **options: Any) -> Any:
    """Call `stock`, or its vocabulary-parallel variant if the head is split over ranks."""
    if isinstance(weight, DTensor):
        return vocab_parallel_logprobs(hidden, weight=weight, **options)
    return stock(hidden, weight=weight, **options)
