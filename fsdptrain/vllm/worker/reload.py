"""Load new weights into a vLLM model that is in use, layer by layer as they arrive."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config  # pyright: ignore - an extra, not the module beside this one
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports] - an extra
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports] - an extra
    get_layerwise_info,
)

from fsdptrain.vllm.worker.cpu_quirks import forget_kernels, repack, request_amx, tied_heads
from fsdptrain.vllm.worker.readback import missing_experts

_MAX_SHOWN = 5  # names in an error
_LAYERS_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


def reload_weights(model: Any, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load all tensors of a checkpoint, by the names of its files. `config` is vLLM's.

    RuntimeError if a parameter or an expert received no weights: vLLM only warns and uses the old ones. After an error
    the model can be loaded again, but must not be used before.
    """
    received: set[str] = set()  # names of the checkpoint
    model.is_quantized = config.model_config.quantization is not None  # it holds other tensors than it receives

    def recorded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            received.add(name)
            yield name, tensor

    request_amx()
    heads = tied_heads(model)
    forget_kernels(model)
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(recorded())  # vLLM's names; None: the model does not report them
        except BaseException:
            for info in map(get_layerwise_info, model.modules()):
                if info.can_load():  # forget what waits for the rest of its layer: finalizing would load it
                    info.load_numel = 0
                    info.loaded_weights.clear()
            raise
        finally:
            level = _LAYERS_LOG.level
            _LAYERS_LOG.setLevel(logging.ERROR)  # it warns of each layer that keeps its weights
            try:
                finalize_layerwise_reload(model, config.model_config)
            finally:
                _LAYERS_LOG.setLevel(level)
            repack(heads.values())
    missing = missing_experts(received)
    if loaded is not None and not model.is_quantized:
        missing += sorted(
            {name for name, _ in model.named_parameters()} - {f"{name}.weight" for name in heads} - loaded
        )
    if missing:
        raise RuntimeError(f"{len(missing)} parameters got no weights, e.g. {', '.join(missing[:_MAX_SHOWN])}")
