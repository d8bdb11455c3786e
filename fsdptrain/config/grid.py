"""Text drawing of the process grid: replicas, shards, and groups that share layers, experts or packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_SHOWN = 4  # groups, and members per group


def draw_grid(config: Config, world_size: int) -> list[str]:
    """Draw the grid that `fsdp/mesh.py` builds. `world_size` must pass `check_world_size`."""
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
    """Draw the grid of `megatron/groups.py`: tensor, stage, context and data ranks, fastest-varying first."""
    split, copies = config.megatron, config.pack_copies
    tensor, stages = split.tensor_parallel, split.pipeline_parallel
    context = f" x {split.context_parallel} context" if split.context_parallel > 1 else ""
    product = f"{world_size // copies} replicas{context} x {stages} pipeline x {tensor} tensor"
    lines = [f"{world_size} processes = {product}, by megatron-core", f"packs {_groups(0, world_size, copies)}"]
    kinds = {  # group size and stride between its members
        "tensor": (tensor, 1),
        "stages": (stages, tensor),
        "context": (split.context_parallel, tensor * stages),
        "experts": (split.expert_parallel, tensor * stages),
    }
    return lines + [
        f"{kind} {_groups(0, world_size, size, apart)}" for kind, (size, apart) in kinds.items() if size > 1
    ]


def across_nodes(config: Config, local_world_size: int) -> Iterator[str]:
    """Warn about groups that span nodes, one line per kind. This is allowed but slow, except for pipeline stages."""
    for flag, size, within in _kinds_that_wait(config):
        if size > 1 and local_world_size % (size * within):
            yield (
                f"{flag} {size}: its groups do not lie within a node of {local_world_size} processes, so every layer "
                f"waits for the network between nodes; a divisor of {local_world_size} would not"
            )


def _kinds_that_wait(config: Config) -> list[tuple[str, int, int]]:
    """Return flag, size and member stride of the group kinds that synchronize in each layer."""
    if config.parallel.backend == "megatron":
        split = config.megatron
        replica = split.tensor_parallel * split.pipeline_parallel
        return [
            ("--megatron-tensor-parallel", split.tensor_parallel, 1),
            ("--megatron-context-parallel", split.context_parallel, replica),
            ("--megatron-expert-parallel", split.expert_parallel, replica),
        ]
    parallel = config.parallel
    return [
        ("--tensor-parallel-size", parallel.tensor_parallel_size, 1),
        ("--expert-parallel-size", parallel.expert_parallel_size, 1),
        ("--context-parallel-size", parallel.context_parallel_size, parallel.tensor_parallel_size),
    ]


def _product(replicas: int, shards: int, kind: str, size: int, name: str) -> str:
    return f"{replicas} replicas x {shards} {kind} x {size} {name}"


def _groups(first: int, count: int, size: int, apart: int = 1) -> str:
    """Format `count` processes from `first` on as bracketed groups of `size` members with stride `apart`."""
    starts = [s for s in range(first, first + count) if (s - first) // apart % size == 0]
    return _some([f"[{_some([str(start + i * apart) for i in range(size)])}]" for start in starts])


def _some(words: list[str]) -> str:
    return " ".join(words if len(words) <= 2 * _SHOWN else [*words[:_SHOWN], "...", words[-1]])
