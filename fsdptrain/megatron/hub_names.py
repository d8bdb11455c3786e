"""Tensors of a model by the names of its modules and by those of its files, which may store them in other parts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain.fsdp.export import stored_entries
from fsdptrain.megatron.conversions import Conversion, Copy, Stored
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


def stored_as(model: PreTrainedModel) -> dict[str, tuple[tuple[str, ...], Conversion]]:
    """Return the names of each tensor of a module in the files, and its conversion. `model` may be on meta."""
    state = module_state(model)
    as_is = {id(tensor): ((name,), Copy()) for name, tensor in revert_weight_conversion(model, state).items()}
    return {
        name: as_is.get(id(x)) or (tuple(revert_weight_conversion(model, {name: x})), Stored(model, name))
        for name, x in state.items()
    }


def by_module(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of files as those of the modules of `model`, which may be on meta."""
    stored, found = stored_as(model), defaultdict[str, dict[str, Tensor]](dict)
    owners = {part: name for name, (parts, _) in stored.items() for part in parts}
    for part, tensor in weights:
        name = owners[part]
        parts, conversion = stored[name]
        found[name][part] = tensor
        if len(found[name]) == len(parts):
            yield name, conversion.read(found.pop(name).__getitem__, parts, 0, 1)
    assert not found, f"incomplete: {', '.join(found)}"


def vision_tensors(path: Path, model: PreTrainedModel, *, modules: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the vision part of `model` from the files of a checkpoint, by their modules or files."""
    if not (names := vision_parameters(model)):
        return
    stored = stored_as(model)
    wanted = {part for name in names for part in stored[name][0]}
    found = ((name, entry[...]) for name, entry in stored_entries(path) if name in wanted)
    yield from by_module(found, model) if modules else found
