"""Load new weights into a vLLM model that is in use, layer by layer as they arrive."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports] - an extra
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fsdptrain.vllm.worker.cpu_quirks import (
    forget_kernels,
    repack_tied_head,
    request_amx,
    restore_kernels,
    tied_heads,
)
from fsdptrain.vllm.worker.expert_names import missing_experts

_MAX_SHOWN = 5  # names in an error
_LAYERS_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class WeightReload:
    """One update: start, load any number of parts, finish."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model: nn.Module = model
        self._config = model_config
        self._received: set[str] = set()  # names of the checkpoint
        self._loaded: set[str] | None = set()  # names of vLLM's parameters; None: the model does not report them
        self._kernels: dict[str, Any] = {}
        self._tied: set[str] = set()  # parameters that are loaded with others

    def start(self) -> None:
        request_amx()
        self._tied = {f"{name}.weight" for name in tied_heads(self._model)}
        self._kernels = forget_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors of a checkpoint, by the names of its files."""
        source: Any = self._model
        loaded = source.load_weights(self._recorded(weights))
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= loaded

    def finish(self) -> None:
        """RuntimeError if a parameter or an expert received no weights: vLLM only warns and uses the old ones."""
        missing = self._missing() + missing_experts(self._received)
        self.abort()
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, e.g. {', '.join(missing[:_MAX_SHOWN])}")

    def abort(self) -> None:
        """End the update without a check: layers without weights keep theirs, others must not be used."""
        level = _LAYERS_LOG.level
        _LAYERS_LOG.setLevel(logging.ERROR)  # it warns of each layer that keeps its weights
        try:
            finalize_layerwise_reload(self._model, self._config)
        finally:
            _LAYERS_LOG.setLevel(level)
        restore_kernels(self._model, self._kernels)
        repack_tied_head(self._model)

    def _recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._received.add(name)
            yield name, tensor

    def _missing(self) -> list[str]:
        if self._loaded is None or self._config.quantization is not None:
            return []
        names = {name for name, _ in self._model.named_parameters()} - self._tied
        return sorted(names - self._loaded)
