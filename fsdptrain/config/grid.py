"""Text drawing of the groups of ranks that share packs, layers or experts, for --dry-run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_SHOWN = 4  # groups, and members per group


def draw_grid(config: Config, world_size: int) -> list[str]:
    """Draw the groups of `config.rank_groups`. `world_size` must pass `check_world_size`."""
    copies, replicas = config.pack_copies, config.fsdp.replicate_size
    groups = [group for group in config.rank_groups if group.size > 1]
    data = f"{replicas} replicas x {world_size // replicas // copies} shards"
    if config.model.backend != "fsdp":
        data = f"{world_size // copies} replicas"
    factors = [f"{group.size} {group.kind}" for group in reversed(groups) if group.shares_packs]
    lines = [f"{world_size} processes = {' x '.join([data, *factors])}"]
    if copies > 1:
        lines.append(f"packs {_groups(world_size, copies)}")
    if replicas > 1:
        lines.append(f"replicas {_groups(world_size, world_size // replicas)}")
    return lines + [f"{group.kind} {_groups(world_size, group.size, group.stride)}" for group in groups]


def _groups(num_ranks: int, size: int, stride: int = 1) -> str:
    """Format the ranks as bracketed groups of `size` members with `stride` between them."""
    starts = [start for start in range(num_ranks) if start // stride % size == 0]
    return _some([f"[{_some([str(start + i * stride) for i in range(size)])}]" for start in starts])


def _some(words: list[str]) -> str:
    return " ".join(words if len(words) <= 2 * _SHOWN else [*words[:_SHOWN], "...", words[-1]])
