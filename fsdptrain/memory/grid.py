"""The sizes of the mesh axes of a run."""

from dataclasses import dataclass

from fsdptrain.config import Config


@dataclass(frozen=True)
class Grid:
    """The sizes of the mesh axes, as in `fsdp/mesh.py`."""

    replicas: int = 1
    shards: int = 1  # for parameters that are not split over experts
    tensor: int = 1
    expert: int = 1
    context: int = 1  # part of `shards`: ranks that share the tokens of a pack

    @classmethod
    def of(cls, config: Config, num_gpus: int) -> "Grid":
        """Create the grid of `config`. If `num_gpus` does not fit, it is rounded down."""
        replicas, tensor = config.fsdp.replicate_size, config.ranks_along("tensor")
        shards = max(1, num_gpus // replicas // tensor)
        return cls(replicas, shards, tensor, config.ranks_along("experts"), config.ranks_along("context"))

    @property
    def is_split(self) -> bool:
        return self.tensor > 1 or self.expert > 1

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.shards * self.tensor

    @property
    def expert_shards(self) -> int:
        return max(1, self.shards * self.tensor // self.expert)
