"""The training loop: collect samples, train on them, sync the weights to the engine, repeat."""

from fsdptrain.trainer.callbacks import Callback
from fsdptrain.trainer.result import RunResult
from fsdptrain.trainer.trainer import Trainer

__all__ = ["Callback", "RunResult", "Trainer"]
