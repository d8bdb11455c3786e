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

from fsdptrain.rollout.weight_sync.checksum import StartedChecksum, finish_checksums, start_checksum
from fsdptrain.vllm.worker.cpu_quirks import forget_kernels, repack, request_amx, tied_heads
from fsdptrain.vllm.worker.experts import missing_experts

_MAX_SHOWN = 5  # names in an error
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)  # it warns of tied heads


class Reload:
    """One update of a model with all tensors of a checkpoint. Takes them in the place of the model.

    After an error the model can be loaded again, but must not be used before.
    """

    def __init__(self, model: Any, config: Any, *, checked: bool) -> None:
        """End an update that has not ended, as if it had not begun.

        config: vLLM's
        checked: compute checksums of the tensors
        """
        self._model, self._config = model, config
        self._checked = checked
        self._received: dict[str, StartedChecksum | None] = {}  # by names of the checkpoint
        self._loaded: set[str] | None = set()  # vLLM's names; None: the model does not report them
        self._error: Exception | None = None
        self._forget_parts()
        self._finalize()
        request_amx()
        self._heads = tied_heads(model)
        forget_kernels(model)
        with set_current_vllm_config(config):
            initialize_layerwise_reload(model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors, by the names of their files. After an error of this or an earlier call, do nothing.

        `finish` raises the error: the trainer and the other workers go on with the transfer until then.
        """
        if self._error is not None:
            return
        try:
            with set_current_vllm_config(self._config):
                loaded = self._model.load_weights(self._recorded(weights))
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            self._error = error
            return
        self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded

    def finish(self) -> None:
        """RuntimeError if a parameter or an expert received no weights: vLLM only warns and uses the old ones."""
        if self._error is not None:
            self._forget_parts()
        self._finalize()
        repack(self._heads.values())
        if self._error is not None:
            raise self._error
        missing = missing_experts(self._received)
        if self._loaded is not None and self._config.model_config.quantization is None:  # it holds what it receives
            needed = {name for name, _ in self._model.named_parameters()} - {f"{name}.weight" for name in self._heads}
            missing += sorted(needed - self._loaded)
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, e.g. {', '.join(missing[:_MAX_SHOWN])}")

    def checksums(self) -> dict[str, int]:
        """Of the tensors that were taken, by the names of their files. Empty unless `checked`."""
        return finish_checksums({name: started for name, started in self._received.items() if started is not None})

    def _recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._received[name] = start_checksum(tensor) if self._checked else None
            yield name, tensor

    def _forget_parts(self) -> None:
        """Forget the tensors that wait for the rest of their layer, which `_finalize` would load."""
        for info in map(get_layerwise_info, self._model.modules()):
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()

    def _finalize(self) -> None:
        with set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._model, self._config.model_config)
