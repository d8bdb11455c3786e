"""The loop: collect samples, train on them, hand the weights to the engine, and again."""

from fsdptrain.trainer.export import export_checkpoint
from fsdptrain.trainer.loop import Trainer

__all__ = ["Trainer", "export_checkpoint"]
