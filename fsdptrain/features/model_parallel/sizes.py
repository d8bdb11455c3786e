"""Check from the config alone, before the weights are loaded, that a model can be split into the given sizes."""

from pathlib import Path

import torch.distributed as dist

from fsdptrain.config import Config
from fsdptrain.memory.pieces import Grid, Pieces
from fsdptrain.model.loading.meta import build_meta_model


def check_sizes(config: Config, checkpoint: Path, num_ranks: int | None = None) -> None:
    """Raise ConfigError if the model does not support a mesh of `num_ranks` (default: all). Collective."""
    trust = config.model.trust_remote_code
    model = build_meta_model(checkpoint, trust_remote_code=trust, attn_implementation="eager")
    Pieces(model, Grid.of(config, num_ranks or dist.get_world_size()))
