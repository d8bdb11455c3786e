"""The processes of a run as a drawing: replicas, shards, and the groups that share layers, experts or packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_SHOWN = 4  # groups, and members of a group


def draw_grid(config: Config, world_size: int) -> list[str]:
    """As `fsdp/mesh.py` builds it; `world_size` fits (`check_world_size`)."""
    if config.parallel.backend == "megatron":
        return _draw_megatron(config, world_size)
    replicas = config.fsdp.replicate_size
    tensor, expert = config.parallel.tensor_parallel_size, config.parallel.expert_parallel_size
    context = config.parallel.context_parallel_size
    own = world_size // replicas
    shards = f"shards x {context} context" if context > 1 else "shards"
    lines = [f"{world_size} processes = {_product(replicas, own // (context * tensor), shards, tensor, 'tensor')}"]
    if expert > 1:
        lines.append(f"experts on {_product(replicas, own // expert, 'expert shards', expert, 'expert')}")
    for replica in range(min(replicas, _SHOWN)):
        drawn = f"replica {replica}: {_groups(replica * own, own, tensor)}"
        drawn += f"; experts {_groups(replica * own, own, expert)}" if expert > 1 else ""
        lines.append(drawn + (f"; packs {_groups(replica * own, own, config.pack_copies)}" if context > 1 else ""))
    return lines + ["..."] * (replicas > _SHOWN)


def _draw_megatron(config: Config, world_size: int) -> list[str]:
    """As `backends/megatron/groups.py` builds it: ranks that share packs are neighbours."""
    split, copies = config.megatron, config.pack_copies
    context = f" x {split.context_parallel} context" if split.context_parallel > 1 else ""
    ranks = f"{split.pipeline_parallel} pipeline{context} x {split.tensor_parallel} tensor"
    product = f"{world_size // copies} replicas x {ranks}"
    lines = [f"{world_size} processes = {product}, by megatron-core", f"packs {_groups(0, world_size, copies)}"]
    if split.expert_parallel > 1:
        lines.append(f"experts {_groups(0, world_size, split.expert_parallel)}")
    return lines


def across_nodes(config: Config, local_world_size: int) -> Iterator[str]:
    """A line for each kind of group that does not lie within a node: allowed, and slow."""
    parallel = config.parallel
    kinds = [
        ("--tensor-parallel-size", parallel.tensor_parallel_size, 1),
        ("--expert-parallel-size", parallel.expert_parallel_size, 1),
        ("--context-parallel-size", parallel.context_parallel_size, parallel.tensor_parallel_size),
    ]
    for flag, size, within in kinds:
        if size > 1 and local_world_size % (size * within):
            yield (
                f"{flag} {size}: its groups do not lie within a node of {local_world_size} processes, so every layer "
                f"waits for the network between nodes; a divisor of {local_world_size} would not"
            )


def _product(replicas: int, shards: int, kind: str, size: int, name: str) -> str:
    return f"{replicas} replicas x {shards} {kind} x {size} {name}"


def _groups(first: int, count: int, size: int) -> str:
    """`count` processes from `first` on, each bracket a group of neighbours."""
    groups = [_some([str(start + i) for i in range(size)]) for start in range(first, first + count, size)]
    return _some([f"[{group}]" for group in groups])


def _some(words: list[str]) -> str:
    return " ".join(words if len(words) <= 2 * _SHOWN else [*words[:_SHOWN], "...", words[-1]])
