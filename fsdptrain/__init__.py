"""fsdptrain: RL and supervised fine-tuning for Hugging Face models with PyTorch's FSDP2.

Names load on first use, so that `import fsdptrain` and `fsdptrain --help` do not import torch.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptrain.config import Config
    from fsdptrain.config.recipe import load_recipe
    from fsdptrain.errors import FsdptrainError
    from fsdptrain.trainer.callbacks import Callback
    from fsdptrain.trainer.result import RunResult
    from fsdptrain.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Callback", "Config", "FsdptrainError", "RunResult", "Trainer", "load_recipe"]

_HOME = {
    "Callback": "fsdptrain.trainer.callbacks",
    "Config": "fsdptrain.config",
    "FsdptrainError": "fsdptrain.errors",
    "RunResult": "fsdptrain.trainer.result",
    "Trainer": "fsdptrain.trainer.trainer",
    "load_recipe": "fsdptrain.config.recipe",
}
# transformers imports torchao, and peft bitsandbytes, wherever they are installed; each warns of kernels that it lacks
_NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def silence_libraries() -> None:
    """Silence warnings of other libraries that no user can act on."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        silence_libraries()  # before torch and transformers are imported
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fsdptrain' has no attribute {name!r}")
