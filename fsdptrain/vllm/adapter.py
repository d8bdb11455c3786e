"""--lora-sync adapter: vLLM keeps the frozen weights and loads the adapter alone, under a new name for each version."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fsdptrain.errors import ConfigError
from fsdptrain.features.lora.config import LoraConfig

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 supports


def adapter_options(lora: LoraConfig) -> dict[str, Any]:
    """vLLM's options. It loads the frozen weights from the checkpoint."""
    rank = next((rank for rank in _RANKS if rank >= lora.rank), None)
    if rank is None:
        raise ConfigError(f"--lora-rank {lora.rank}: with --lora-sync adapter vLLM supports ranks up to {_RANKS[-1]}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "load_format": "auto"}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], write_config: Callable[[Path], None]) -> None:
    """Write the adapter in peft's format."""
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_config(folder)


class AdapterSlot:
    """The one adapter that an engine in this process holds, and the folder that it was loaded from."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._folder: TemporaryDirectory[str] | None = None
        self.request: Any = None  # vLLM's LoRARequest for each prompt

    def load(self, tensors: Mapping[str, Tensor], write_config: Callable[[Path], None], version: int) -> None:
        """Replace the adapter. Raises vLLM's own error if it cannot load it."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] - an extra

        if self.request is not None:
            self._llm.llm_engine.remove_lora(self.request.lora_int_id)
        folder = TemporaryDirectory(prefix="fsdptrain-adapter-")
        write_adapter(Path(folder.name), tensors, write_config)
        number = 1 if self.request is None else self.request.lora_int_id + 1
        self.request = LoRARequest(f"version-{version}", number, folder.name)
        self._llm.llm_engine.add_lora(self.request)
        self.close()
        self._folder = folder

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
