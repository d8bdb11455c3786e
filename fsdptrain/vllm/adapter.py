"""--lora-sync adapter: vLLM keeps the frozen weights, and gets the adapter alone, under a new name for each version."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fsdptrain.config import LoraConfig
from fsdptrain.errors import ConfigError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 has room for


def adapter_options(lora: LoraConfig) -> dict[str, Any]:
    """What vLLM must be started with. The frozen weights are those of the checkpoint."""
    rank = next((rank for rank in _RANKS if rank >= lora.rank), None)
    if rank is None:
        raise ConfigError(f"--lora-sync adapter: vLLM takes no rank above {_RANKS[-1]}, and --lora-rank is {lora.rank}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "load_format": "auto"}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], write_config: Callable[[Path], None]) -> None:
    """As peft stores one; vLLM reads it from there."""
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_config(folder)


class AdapterSlot:
    """The one adapter that vLLM holds, and the folder that it was read from."""

    def __init__(self, llm: Any, make_request: Callable[[str, int, str], Any]) -> None:
        self._llm = llm
        self._make_request = make_request
        self._folder: TemporaryDirectory[str] | None = None
        self.request: Any = None  # what each prompt must be asked with

    def load(self, tensors: Mapping[str, Tensor], write_config: Callable[[Path], None], version: int) -> None:
        """In place of the one before. vLLM's own error where it cannot take it."""
        if self.request is not None:
            self._llm.llm_engine.remove_lora(self.request.lora_int_id)
        folder = TemporaryDirectory(prefix="fsdptrain-adapter-")
        write_adapter(Path(folder.name), tensors, write_config)
        number = 1 if self.request is None else self.request.lora_int_id + 1
        self.request = self._make_request(f"version-{version}", number, folder.name)
        self._llm.llm_engine.add_lora(self.request)
        self.close()
        self._folder = folder

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
