"""The training loop: collect samples, train on them, sync the weights to the engine, repeat."""

from typing import TYPE_CHECKING, Any

from fsdptrain.trainer.callbacks import Callback
from fsdptrain.trainer.result import RunResult
from fsdptrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from fsdptrain.trainer.export import export_checkpoint

__all__ = ["Callback", "RunResult", "Trainer", "export_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "export_checkpoint":  # a run does not need it
        from fsdptrain.trainer.export import export_checkpoint

        return export_checkpoint
    raise AttributeError(f"module 'fsdptrain.trainer' has no attribute {name!r}")
