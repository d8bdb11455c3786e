"""The loop: collect samples, train on them, hand the weights to the engine, and again."""

from fsdptrain.trainer.fit import Trainer, export_checkpoint

__all__ = ["Trainer", "export_checkpoint"]
