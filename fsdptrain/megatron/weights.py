"""Load weights from files into megatron-core and export them, tensor by tensor, using the conversion table.

A rank reads only its own slices and holds at most one tensor in addition to its model. On export each tensor is
gathered over the ranks that share it, and every rank gets the full tensor.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.megatron.bridge import entries_of
from fsdptrain.megatron.conversions import Source
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.hub_names import Shapes, hub_state, shapes_of
from fsdptrain.megatron.table import Entry, stored_tensors
from fsdptrain.model.loading.files import some_of, weight_files
from fsdptrain.model.loading.materialize import refuse_leftovers


@contextmanager
def open_files(path: Path, shapes: Shapes, *, ignored: Sequence[str] = ()) -> Iterator[Source]:
    """Open the safetensors files of a checkpoint for slice-wise reads. Raises CheckpointError if shapes do not match.

    Experts in one tensor get the names that they have in files which store each by itself.

    ignored: patterns of extra names to accept, as transformers does (for example heads that predict several tokens).
    """
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(path):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                found |= {name: opened.get_slice(name)} if name in shapes else _apart(name, opened.get_slice(name))
        # a tied head may be stored twice; rotary tables are computed
        known = re.compile("|".join([r"^lm_head\.weight$", r"rotary_emb\.inv_freq$", *ignored]))
        unused = {name for name in found if name not in shapes and not known.search(name)}
        refuse_leftovers(path, shapes.keys() - found.keys(), unused)
        yield lambda name: found[name]() if callable(found[name]) else found[name]


def _apart(name: str, whole: Any) -> dict[str, Any]:
    """Return functions that read the rows of each expert from a tensor [E, F, D] of all; others as they are."""
    layer, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    if not parts or not layer.endswith(".experts"):
        return {name: whole}
    count, rows = whole.get_shape()[0], whole.get_shape()[1] // len(parts)
    return {
        f"{layer}.{expert}.{part}.weight": lambda e=expert, i=i: whole[e : e + 1, i * rows : (i + 1) * rows][0]
        for expert in range(count)
        for i, part in enumerate(parts)
    }


class Exported(NamedTuple):
    """Facts about a tensor that the other stages need."""

    names: list[str]  # in the files
    dtype: torch.dtype
    is_parameter: bool


class WeightMap:
    """The conversion table of one model, on this rank and over all stages. Construction and use are collective."""

    def __init__(
        self, model: nn.ModuleList, stock: PreTrainedModel, *, shapes: Shapes | None = None, bridge: str = "own"
    ) -> None:
        """Build and check the table. stock: the same model in transformers, possibly on meta.

        shapes: shapes of the files, if they differ from those of `stock`. bridge: --megatron-bridge. Raises
        CheckpointError on all ranks unless every tensor of the files is used exactly once, but for those of a vision
        part.
        """
        self._groups = groups = process_groups()
        config: Any = model[0].config
        self._experts_per_rank = (config.num_moe_experts or 0) // self._groups.ep.size()
        self._model, self._shapes = model, shapes or shapes_of(hub_state(stock, vision=False))
        self.ignored = list(stock._keys_to_ignore_on_load_unexpected or ())
        self.entries, self.converter = entries_of(bridge, model, stock)
        self._own = [entry for entry in self.entries if not entry.is_copy]
        tensors = [(entry, self._tensors[entry.name]) for entry in self._own]
        own = [Exported(self._all_names(entry), x.dtype, x.requires_grad) for entry, x in tensors]
        self._stages: list[Any] = [None] * groups.pp.size()  # a list[Exported] each
        dist.all_gather_object(self._stages, own, group=groups.pp)
        with raise_on_all_ranks(CheckpointError, "--backend megatron"):
            self._check()

    def _check(self) -> None:
        every = Counter(name for stage in self._stages for exported in stage for name in exported.names)
        problems = {
            "have no place in it": [name for name in self._shapes if name not in every],
            "are not in the files": [name for name in every if name not in self._shapes],
            "have multiple places": [name for name, count in every.items() if count > 1],
        }
        words = "; ".join(f"{some_of(names)} {kind}" for kind, names in problems.items() if names)
        if words:
            raise CheckpointError(f"--backend megatron: the model of megatron-core does not fit: {words}")

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return stored_tensors(self._model)

    def _expert_ranks(self, entry: Entry) -> Sequence[int]:
        return range(self._groups.ep.size()) if entry.expert is not None else (0,)

    def _names(self, entry: Entry, expert_rank: int) -> list[str]:
        return entry.hub_names(expert_rank, self._experts_per_rank)

    def _all_names(self, entry: Entry) -> list[str]:
        """Return the names of an entry in the files. For an expert, includes those on other expert-parallel ranks."""
        return [name for rank in self._expert_ranks(entry) for name in self._names(entry, rank)]

    @torch.no_grad()
    def load(
        self, source: Source, put: Callable[[str, Tensor], None] | None = None, *, only_parameters: bool = False
    ) -> None:
        """Fill this rank's tensors. Not collective.

        Args:
            put: receives each parameter by name, instead of the model.
            only_parameters: skip buffers.
        """
        rank, size = self._groups.tp.rank(), self._groups.tp.size()
        for entry in self.entries:
            target = self._tensors[entry.name]
            is_parameter = target.requires_grad
            if only_parameters and not is_parameter:
                continue
            names = self._names(entry, self._groups.ep.rank())
            try:
                found = entry.conversion.read(source, names, rank, size)
            except SafetensorError as error:
                raise CheckpointError(f"{', '.join(entry.hub)} cannot be read: {error}") from error
            if found.shape != target.shape:
                raise CheckpointError(
                    f"{entry.name} is {list(target.shape)}, but the files make {list(found.shape)} of it"
                )
            if put is not None and is_parameter:
                put(entry.name, found)
            else:
                target.copy_(found)

    def shapes(self, *, only_parameters: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `stream` yields, in order."""
        kept = [x for stage in self._stages for x in stage if x.is_parameter or not only_parameters]
        return {name: self._shapes[name] for exported in kept for name in exported.names}

    @torch.no_grad()
    def stream(
        self,
        *,
        dtype: torch.dtype | None = None,
        of: Callable[[str], Tensor] | None = None,
        only_parameters: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, full tensor) for all tensors, on every rank. Collective; iterate to the end.

        Args:
            dtype: dtype of parameters; buffers keep their dtype.
            of: returns other tensors to export, shaped as the parameters, by name. Called on all ranks of the
                parameter's stage.
        """
        for stage, tensors in enumerate(self._stages):
            own = stage == self._groups.pp.rank()
            for index, exported in enumerate(tensors):
                if only_parameters and not exported.is_parameter:
                    continue
                wanted = dtype if dtype is not None and exported.is_parameter else exported.dtype
                other = of if exported.is_parameter else None
                found = self._whole(self._own[index], wanted, other) if own else []
                for i, name in enumerate(exported.names):
                    yield name, self._over_stages(name, found[i] if own else None, stage, wanted)

    def _whole(self, entry: Entry, dtype: torch.dtype, of: Callable[[str], Tensor] | None) -> list[Tensor]:
        """Return full tensors in the order of `_all_names`."""
        tensor = of(entry.name) if of else self._tensors[entry.name]
        whole = entry.conversion.join(_gathered(tensor.detach().to(dtype), self._groups.tp))
        if entry.expert is None:
            return whole
        by_rank = [_gathered(tensor, self._groups.ep) for tensor in whole]
        return [tensors[rank] for rank in self._expert_ranks(entry) for tensors in by_rank]

    def _over_stages(self, name: str, found: Tensor | None, stage: int, dtype: torch.dtype) -> Tensor:
        if found is None:
            device = next(iter(self._tensors.values())).device
            found = torch.empty(self._shapes[name], dtype=dtype, device=device)
        if self._groups.pp.size() > 1:
            found = found.contiguous()
            dist.broadcast(found, group=self._groups.pp, group_src=stage)
        return found


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
