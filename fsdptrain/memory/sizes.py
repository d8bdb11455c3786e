"""Whether a model can be split as the flags say, from its config alone: before its weights are anywhere near."""

from fsdptrain.config import Config
from fsdptrain.memory.pieces import Grid, Pieces
from fsdptrain.tools.inspect.inspection import meta_model


def check_sizes(config: Config, num_ranks: int) -> None:
    """ConfigError where heads, experts, widths or what mixes tokens do not allow a mesh of `num_ranks`. Collective."""
    if not config.parallel.splits and config.parallel.context_parallel_size == 1:
        return
    model, _ = meta_model(config)
    Pieces(model, Grid.of(config, num_ranks))
