"""Tensors of a model by the names of its modules and by those of its files, which may store them in other parts."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from fsdptrain.fsdp.export import stored_entries
from fsdptrain.megatron.conversions import Source
from fsdptrain.model.structure import vision_parameters

Shapes = Mapping[str, tuple[int, ...]]


def module_state(model: PreTrainedModel, *, vision: bool = True) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of `model`, by their modules. vision: with those of its vision part."""
    left_out = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    left_out |= set() if vision else vision_parameters(model).keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


def hub_state(model: PreTrainedModel, *, vision: bool = True) -> dict[str, Tensor]:
    """Return `module_state` by the names in the files, as it is stored there. `model` may be on meta."""
    return revert_weight_conversion(model, module_state(model, vision=vision))


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def module_source(model: PreTrainedModel, source: Source) -> Source:
    """Return a source of the tensors of modules, from one of the tensors of files."""
    state = model.state_dict()
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, state).items()}

    def found(name: str) -> Any:
        in_files = stored.get(id(state[name]))
        return _converted(model, name, state[name], source) if in_files is None else source(in_files)

    return found


def _converted(model: PreTrainedModel, name: str, like: Tensor, source: Source) -> Tensor:
    """Make a tensor that files store in parts, such as the experts of a layer, as transformers' reader does."""
    from fsdptrain.model.loading.shard_reader import conversions_of

    mapping = conversions_of(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    made: Any = {}
    for part in revert_weight_conversion(model, {name: like}):
        _, pattern = rename_source_key(part, renamings, converters)
        made = next(entry for entry in converters if pattern in entry.source_patterns)
        made.add_tensor(name, part, pattern, source(part)[:])
    joined = made.convert(name, model=model, config=model.config)[name]
    return joined[0] if isinstance(joined, list) else joined


def by_module(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of files as those of the modules of `model`, which may be on meta, layer by layer."""
    found: dict[str, Tensor] = {}
    source = module_source(model, found.__getitem__)
    names = {layer: list(some) for layer, some in groupby(module_state(model), _layer)}
    for layer, some in groupby(weights, lambda named: _layer(named[0])):
        found.clear()
        found.update(some)
        yield from ((name, source(name)) for name in names[layer])


def in_files(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of modules as those of files, layer by layer."""
    for _, some in groupby(weights, lambda named: _layer(named[0])):
        yield from revert_weight_conversion(model, dict(some)).items()


def _layer(name: str) -> str:
    """Return the path of the layer of a tensor; outside of layers its own name."""
    return (re.findall(r"^.*?\.\d+\.", name) or [name])[0]


def vision_tensors(path: Path, model: PreTrainedModel, *, modules: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the vision part of `model` from the files of a checkpoint, by their modules or files."""
    parameters = dict[str, Tensor](vision_parameters(model))
    names = {id(tensor): name for name, tensor in parameters.items()}
    stored = {name: names[id(tensor)] for name, tensor in revert_weight_conversion(model, parameters).items()}
    for name, entry in stored_entries(path):
        if name in stored:
            yield stored[name] if modules else name, entry[...]
