"""The training loop: collect samples, train on them, sync the weights to the engine, repeat."""

from fsdptrain.trainer.export import export_checkpoint
from fsdptrain.trainer.loop import Trainer

__all__ = ["Trainer", "export_checkpoint"]
