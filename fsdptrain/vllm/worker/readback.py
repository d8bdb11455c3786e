"""Reads weights back out of vLLM's own layers, by the names of a checkpoint.

vLLM fuses layers (q, k and v in one, all experts of a layer), and on a CPU it packs a copy of each and drops the
original. A packed layer is read by what it answers to unit vectors: one of them and zeros, so no rounding; packed
experts are put in order again. With engine tensor parallelism the parts of a tensor are gathered: all its workers read
the same names at one time. Copies that ought to be equal and are not are left as they are, beside each other: no tensor
of the trainer is equal to that.

Imported in vLLM's own processes too: beside vLLM it needs torch and nothing else.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdptrain.rollout.weight_sync.checksum import checksum
from fsdptrain.types import ChecksumKind
from fsdptrain.vllm.worker.expert_names import EXPERT
from fsdptrain.vllm.worker.packed_experts import Unpacker, packing_of

_UNITS_AT_ONCE = 256  # rows
_PLAIN = ("TRITON", "BATCHED_TRITON")  # kernels that read experts as they come; others have orders of their own


def checksums(model: nn.Module, names: Collection[str], kind: ChecksumKind) -> dict[str, int]:
    """`models.checksum.checksum` of the tensors called `names`; those that cannot be found are left out."""
    return {name: checksum(tensor, kind) for name, tensor in readable(model, sorted(names))}


@torch.inference_mode()
def readable(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the model computes with them: of an embedding with a tied head, what the head has made of it."""
    reader = _Reader(model)
    for name in names:
        tensor = reader.find(name)
        if tensor is not None:
            yield name, tensor


class _Reader:
    """Keeps the last layer that was unpacked: the parts of a fused one stand side by side."""

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
        self._unpacker = Unpacker()

    def find(self, name: str) -> Tensor | None:
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            return self._expert(expert["experts"], int(expert["number"]), expert["part"])
        inner = self._inner(name)
        if inner is None:
            return None
        path, _, kind = inner.rpartition(".")
        if kind != name.rpartition(".")[2]:
            return None  # vLLM keeps something else, as A for A_log
        parent, _, leaf = path.rpartition(".")
        part = name.rpartition(".")[0].rpartition(".")[2]  # some mappers give the name of the fused layer
        fused, index = self._fused.get(part, ("", 0))
        if not fused or leaf not in (part, fused) or (leaf == part and path in self._modules):
            return self._whole(path, kind)
        return self._part(f"{parent}.{fused}" if parent else fused, kind, index)

    def _inner(self, name: str) -> str | None:
        """What vLLM calls it."""
        return name if self._mapper is None else self._mapper.map_name(name)

    def _expert(self, experts: str, number: int, part: str) -> Tensor | None:
        """One matrix of the experts that lie under `experts`; None where a worker holds some of them, or in an
        order that we do not know."""
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
            tensor = self._unpacker.unpack(tensor, packing)
        config = module.moe_config
        hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
        num_parts = config.moe_parallel_config.tp_size
        if kind == "w2_weight":
            return _gathered(tensor[:hidden, :inner], 1, num_parts)
        begin = len(tensor) // 2 if part == up else 0  # gate, then up, each padded to half of the rows
        return _gathered(tensor[begin : begin + inner, :hidden], 0, num_parts)

    def _part(self, path: str, kind: str, index: int) -> Tensor | None:
        """The tensor number `index` of those that are fused in the layer at `path`."""
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
        """What this worker holds."""
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
            module = head  # its packed copy is what answers: the embedding itself is looked up
        if kind == "weight" and hasattr(module, "cpu_linear") and (tensor.numel() == 0 or module is head):
            tensor = _unpacked(module, tensor)
        return tensor


def _unpacked(module: Any, weight: Tensor) -> Tensor:
    """[out, in], in the dtype of `weight`."""
    units = torch.eye(module.input_size // _num_parts(module, 1), dtype=weight.dtype)
    return torch.cat([module.cpu_linear(rows, weight, None) for rows in units.split(_UNITS_AT_ONCE)]).t()


def _knows_its_split(module: Any, kind: str) -> bool:
    """Of vLLM's own layers. Others may hold the whole of a parameter on each worker, as norms do, or a part, as of
    dt_bias, A_log and sinks."""
    from vllm.model_executor.layers.linear import LinearBase  # pyright: ignore[reportMissingImports] - an extra
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        VocabParallelEmbedding,
    )

    return kind in ("weight", "bias") and isinstance(module, LinearBase | VocabParallelEmbedding)


def _of_all(held: Tensor) -> Tensor | None:
    """What the workers hold of a parameter that nobody says how they share it: one after the other, and what all
    neighbours hold alike once. None where all numbers are the same, which a whole and a part of it have in common."""
    if held.dim() == 0:
        return held
    parts = _all_gathered(held, 0)
    if len(parts) > 1 and all(bool((part == held.flatten()[0]).all()) for part in parts):
        return None
    copies = next(n for n in range(len(parts), 0, -1) if len(parts) % n == 0 and _are_copies(parts, n))
    return torch.cat(parts[::copies])


def _num_parts(module: Any, dim: int) -> int:
    """Over how many workers rows (dim 0) or columns (1) of one of vLLM's own layers are split."""
    from vllm.model_executor.layers.linear import ReplicatedLinear  # pyright: ignore[reportMissingImports] - an extra

    if isinstance(module, ReplicatedLinear):
        return 1
    if dim == 0:
        return module.output_size // module.output_size_per_partition
    return module.input_size // module.input_size_per_partition


def _gathered(part: Tensor, dim: int, num_parts: int, copies: int = 1) -> Tensor:
    """All parts of a tensor that is split along `dim`, each of which so many workers hold; collective if it is."""
    if num_parts == 1:
        return part
    parts = _all_gathered(part, dim)
    return torch.cat(parts[::copies] if _are_copies(parts, copies) else parts, dim)


def _are_copies(parts: Sequence[Tensor], count: int) -> bool:
    """Each `count` neighbours hold the same."""
    return all(torch.equal(part, parts[i - i % count]) for i, part in enumerate(parts))


def _all_gathered(part: Tensor, dim: int) -> tuple[Tensor, ...]:
    """By worker; collective."""
    from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports] - an extra

    group = get_tp_group()
    return group.all_gather(part.contiguous(), dim).chunk(group.world_size, dim)
