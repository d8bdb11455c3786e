"""New weights for a vLLM model that answers already, layer by layer as they come; and what vLLM forgets on CPUs.

Imported in vLLM's own processes too: beside vLLM it needs torch and nothing else.
"""

import logging
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports] - an extra
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fsdptrain.vllm.worker.expert_names import missing_experts
from fsdptrain.vllm.worker.packed_experts import forget_kernels, restore_kernels
from fsdptrain.vllm.worker.tied_head import repack_tied_head, tied_heads

_SHOWN = 5  # names that an error lists
_LAYERS_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class WeightReload:
    """One update: start, any number of parts, finish. It fails where a parameter of the model got no weights."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model: nn.Module = model
        self._config = model_config
        self._came: set[str] = set()
        self._loaded: set[str] | None = set()
        self._kernels: dict[str, Any] = {}
        self._tied: set[str] = set()  # parameters that come with others

    def start(self) -> None:
        ask_for_tiles()
        self._tied = {f"{name}.weight" for name in tied_heads(self._model)}
        self._kernels = forget_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Tensors of a checkpoint, by the names of its files."""
        source: Any = self._model
        loaded = source.load_weights(self._noted(weights))
        if loaded is None or self._loaded is None:  # a model that does not tell
            self._loaded = None
        else:
            self._loaded |= loaded

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._came.add(name)
            yield name, tensor

    def finish(self) -> None:
        missing = self._missing() + missing_experts(self._came)
        self.end()
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, e.g. {', '.join(missing[:_SHOWN])}")

    def end(self) -> None:
        """Without a look at what came: layers without weights keep theirs, others are not to be used as they are."""
        level = _LAYERS_LOG.level
        _LAYERS_LOG.setLevel(logging.ERROR)  # it warns of each layer that keeps what it has
        try:
            finalize_layerwise_reload(self._model, self._config)
        finally:
            _LAYERS_LOG.setLevel(level)
        restore_kernels(self._model, self._kernels)
        repack_tied_head(self._model)

    def _missing(self) -> list[str]:
        """vLLM only warns of layers that got no weights, and answers with their old ones."""
        if self._loaded is None or self._config.quantization is not None:
            return []
        names = {name for name, _ in self._model.named_parameters()} - self._tied
        return sorted(names - self._loaded)


def ask_for_tiles() -> None:
    """A process must ask Linux before it uses a CPU's matrix tiles (AMX). vLLM's attention in bfloat16 relies on others
    to have done so, and where none has the process ends by an illegal instruction."""
    if platform.machine() == "x86_64" and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
