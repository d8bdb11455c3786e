"""Read weights back from vLLM's own layers, by the names of a checkpoint.

vLLM fuses layers (q, k and v; all experts of a layer), and on a CPU it packs a copy of each and drops the original. A
packed linear layer is read by multiplying unit vectors, which is exact; packed experts are permuted back. With tensor
parallelism the parts of a tensor are gathered: all workers read the same names at the same time. Copies that should be
equal and are not are concatenated, which equals no tensor of the trainer.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdptrain.rollout.weight_sync.checksum import finish_checksums, start_checksum
from fsdptrain.vllm.worker.cpu_quirks import forget_orders, packing_of, unpack

if TYPE_CHECKING:
    from fsdptrain.types import ChecksumKind

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")  # in a checkpoint
_UNITS_AT_ONCE = 256  # rows
_PLAIN = ("TRITON", "BATCHED_TRITON")  # kernels that keep the layout of experts


def checksums(model: nn.Module, names: Collection[str], kind: "ChecksumKind") -> dict[str, int]:
    """Checksums of the tensors `names`; those that cannot be read are left out, and all of a quantized model."""
    if getattr(model, "is_quantized", False):
        return {}
    try:
        return finish_checksums({name: start_checksum(tensor, kind) for name, tensor in readable(model, sorted(names))})
    finally:
        forget_orders()


@torch.inference_mode()
def readable(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the model computes with them: of a tied embedding, the packed copy of its head."""
    reader = _Reader(model)
    for name in names:
        tensor = reader.find(name)
        if tensor is not None:
            yield name, tensor


class _Reader:
    """Caches the last layer that was unpacked, because the parts of a fused layer are read one after the other."""

    def __init__(self, model: nn.Module) -> None:
        source: Any = model
        self._modules = dict(model.named_modules())
        self._mapper = getattr(source, "hf_to_vllm_mapper", None)
        self._fused = {
            part: (whole, index)
            for whole, parts in getattr(source, "packed_modules_mapping", {}).items()
            for index, part in enumerate(parts)
            if len(parts) > 1
        }
        self._last: tuple[str, Tensor | None] = ("", None)

    def find(self, name: str) -> Tensor | None:
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            return self._expert(expert["experts"], int(expert["number"]), expert["part"])
        inner = self._inner(name)
        if inner is None:
            return None
        path, _, kind = inner.rpartition(".")
        if kind != name.rpartition(".")[2]:
            return None  # vLLM stores a function of it, as A for A_log
        parent, _, leaf = path.rpartition(".")
        part = name.rpartition(".")[0].rpartition(".")[2]  # some mappers return the name of the fused layer
        fused, index = self._fused.get(part, ("", 0))
        if not fused or leaf not in (part, fused) or (leaf == part and path in self._modules):
            return self._whole(path, kind)
        return self._part(f"{parent}.{fused}" if parent else fused, kind, index)

    def _inner(self, name: str) -> str | None:
        """vLLM's name."""
        return name if self._mapper is None else self._mapper.map_name(name)

    def _expert(self, experts: str, number: int, part: str) -> Tensor | None:
        """One matrix of an expert; None if this worker holds only some of the experts, or in an unknown layout."""
        path = (self._inner(f"{experts}.routed_experts.w2_weight") or "").rpartition(".")[0]
        module: Any = self._modules.get(path)
        if module is None or module.local_num_experts != module.global_num_experts:
            return None
        gate, up = module.ckpt_gate_proj_name, module.ckpt_up_proj_name
        kind = {gate: "w13_weight", up: "w13_weight", module.ckpt_down_proj_name: "w2_weight"}.get(part)
        packing, backend = packing_of(module), getattr(module.quant_method, "unquantized_backend", None)
        if kind is None or (packing is None and getattr(backend, "value", None) not in _PLAIN):
            return None
        tensor = getattr(module, kind)[number]
        if packing is not None:
            tensor = unpack(tensor, packing)
        config = module.moe_config
        hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
        num_parts = config.moe_parallel_config.tp_size
        if kind == "w2_weight":
            return _gathered(tensor[:hidden, :inner], 1, num_parts)
        begin = len(tensor) // 2 if part == up else 0  # gate, then up, each padded to half of the rows
        return _gathered(tensor[begin : begin + inner, :hidden], 0, num_parts)

    def _part(self, path: str, kind: str, index: int) -> Tensor | None:
        """Tensor number `index` of those that are fused in the layer at `path`."""
        module: Any = self._modules.get(path)
        held = self._held(path, kind)
        if held is None or not _knows_its_split(module, kind) or sum(module.output_partition_sizes) != len(held):
            return None
        copies = getattr(module, "num_kv_head_replicas", 1) if index else 1
        return _gathered(held.split(list(module.output_partition_sizes))[index], 0, _num_parts(module, 0), copies)

    def _whole(self, path: str, kind: str) -> Tensor | None:
        module: Any = self._modules.get(path)
        held = self._held(path, kind)
        if held is None:
            return None
        if not _knows_its_split(module, kind):
            return _of_all(held)
        for dim in range(held.dim()):
            held = _gathered(held, dim, _num_parts(module, dim))
        size = getattr(module, "org_vocab_size", None)
        return held if size is None or kind != "weight" else held[:size]

    def _held(self, path: str, kind: str) -> Tensor | None:
        """This worker's part."""
        key = f"{path}.{kind}"
        if self._last[0] != key:
            self._last = key, self._read(path, kind)
        return self._last[1]

    def _read(self, path: str, kind: str) -> Tensor | None:
        module: Any = self._modules.get(path)
        tensor = getattr(module, kind, None)
        if not isinstance(tensor, Tensor):
            return None
        head: Any = self._modules.get("lm_head")
        if head is not None and head.weight is tensor and hasattr(head, "cpu_linear"):
            module = head  # the model computes with its packed copy; the embedding is only looked up
        if kind == "weight" and hasattr(module, "cpu_linear") and (tensor.numel() == 0 or module is head):
            tensor = _unpacked(module, tensor)
        return tensor


def _unpacked(module: Any, weight: Tensor) -> Tensor:
    """[out, in], in the dtype of `weight`."""
    units = torch.eye(module.input_size // _num_parts(module, 1), dtype=weight.dtype)
    return torch.cat([module.cpu_linear(rows, weight, None) for rows in units.split(_UNITS_AT_ONCE)]).t()


def _knows_its_split(module: Any, kind: str) -> bool:
    """True for vLLM's own layers. Other modules hold a whole parameter on each worker (norms), or a part (dt_bias,
    A_log, sinks)."""
    from vllm.model_executor.layers.linear import LinearBase  # pyright: ignore[reportMissingImports] - an extra
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        VocabParallelEmbedding,
    )

    return kind in ("weight", "bias") and isinstance(module, LinearBase | VocabParallelEmbedding)


def _of_all(held: Tensor) -> Tensor | None:
    """The parts of all workers of a parameter with unknown sharding, concatenated, with equal neighbors counted once.

    None if all numbers are the same, because then a part looks like the whole.
    """
    if held.dim() == 0:
        return held
    parts = _all_gathered(held, 0)
    if len(parts) > 1 and all(bool((part == held.flatten()[0]).all()) for part in parts):
        return None
    copies = next(n for n in range(len(parts), 0, -1) if len(parts) % n == 0 and _are_copies(parts, n))
    return torch.cat(parts[::copies])


def _num_parts(module: Any, dim: int) -> int:
    """The number of workers that rows (dim 0) or columns (1) of one of vLLM's own layers are split over."""
    from vllm.model_executor.layers.linear import ReplicatedLinear  # pyright: ignore[reportMissingImports] - an extra

    if isinstance(module, ReplicatedLinear):
        return 1
    if dim == 0:
        return module.output_size // module.output_size_per_partition
    return module.input_size // module.input_size_per_partition


def _gathered(part: Tensor, dim: int, num_parts: int, copies: int = 1) -> Tensor:
    """The whole tensor from parts along `dim`, each held by `copies` workers. Collective if num_parts > 1."""
    if num_parts == 1:
        return part
    parts = _all_gathered(part, dim)
    return torch.cat(parts[::copies] if _are_copies(parts, copies) else parts, dim)


def _are_copies(parts: Sequence[Tensor], count: int) -> bool:
    """Whether each `count` neighbors are equal."""
    return all(torch.equal(part, parts[i - i % count]) for i, part in enumerate(parts))


def _all_gathered(part: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The parts by worker. Collective."""
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports] - an extra

    group = get_tp_group()
    return group.all_gather(part.contiguous(), dim).chunk(group.world_size, dim)


def missing_experts(received: Iterable[str]) -> list[str]:
    """Names that `received` lacks. All layers have the same number of experts, all experts of a layer the same parts.

    vLLM fuses experts, and counts the fused tensor as loaded when one of them has arrived.
    """
    found: dict[str, set[tuple[int, str]]] = {}
    for match in filter(None, map(EXPERT.fullmatch, received)):
        found.setdefault(match["experts"], set()).add((int(match["number"]), match["part"]))
    count = max((number + 1 for held in found.values() for number, _ in held), default=0)
    return [
        f"{experts}.{number}.{part}.weight"
        for experts, held in found.items()
        for number in range(count)
        for part in sorted({part for _, part in held})
        if (number, part) not in held
    ]
