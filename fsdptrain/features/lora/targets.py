"""Select the weights to adapt: map the names of --lora-targets to the options of peft.

peft distinguishes linear layers (`target_modules`), computed as base plus adapter, and other weights
(`target_parameters`), such as fused experts, which it replaces while their module runs.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdptrain.errors import ConfigError
from fsdptrain.model.structure import language_model, lm_head
from fsdptrain.registry import suggest

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Targets:
    """Target names in the stock model."""

    modules: tuple[str, ...]  # linear layers
    parameters: tuple[str, ...]  # other weights, and linear layers whose names peft maps to other weights

    @property
    def weights(self) -> set[str]:
        return {f"{name}.weight" for name in self.modules} | set(self.parameters)


def find_targets(model: PreTrainedModel, names: Sequence[str]) -> Targets:
    """Resolve `names` (--lora-targets) in `model`. Raises ConfigError for a name without adaptable weights.

    A name that matches in the language model does not select weights of a vision tower.
    """
    head = lm_head(model)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    other = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n.rpartition(".")[0] not in linear}
    text = set(language_model(model).modules())
    in_text = [name for name in linear if model.get_submodule(name) in text]
    other_in_text = [name for name in other if model.get_submodule(name.rpartition(".")[0]) in text]
    chosen: set[str] = set()
    parameters: set[str] = set()
    for name in names:
        found, weights = set(in_text), set[str]()
        if name != ALL_LINEAR:
            found, weights = _named(in_text, other_in_text, name)
            if not found and not weights:
                found, weights = _named(linear, other, name)
        if not found and not weights:
            leaves = sorted({_leaf(n.removesuffix(".weight")) for n in [*linear, *other]})
            raise ConfigError(
                f"--lora-targets {name}: {type(model).__name__} has no such linear layer or weight"
                f"{suggest(name, [ALL_LINEAR, *leaves])}"
            )
        for weight in weights:
            _require_adaptable(model, weight, other[weight])
        chosen |= found
        parameters |= weights
    renamed = {leaf for leaf in {_leaf(name) for name in chosen} if _means_another(model, leaf)}
    parameters |= {f"{name}.weight" for name in chosen if _leaf(name) in renamed}
    modules = {name for name in chosen if _leaf(name) not in renamed}
    return Targets(tuple(sorted(modules)), tuple(sorted(parameters)))


def find_whole(model: PreTrainedModel, names: Sequence[str], adapted: Set[str]) -> set[str]:
    """Return the names of the parameters in the modules of --lora-modules-to-save; a tied one has several.

    adapted: weights that --lora-targets names. Raises ConfigError for a name without parameters, or with one of these.
    """
    modules = [name for name, module in model.named_modules() if next(module.parameters(), None) is not None]
    chosen: set[nn.Parameter] = set()
    for name in names:
        found = _ending_in(modules, name)
        if not found:
            near = suggest(name, sorted(set(map(_leaf, modules))))
            raise ConfigError(f"--lora-modules-to-save {name}: {type(model).__name__} has no such module{near}")
        chosen |= {p for module in found for p in model.get_submodule(module).parameters()}
    whole = {name for name, p in model.named_parameters(remove_duplicate=False) if p in chosen}
    if twice := sorted(whole & adapted):
        raise ConfigError(f"--lora-modules-to-save and --lora-targets both name {twice[0]}: name it in one of them")
    return whole


def _named(linear: Iterable[str], other: Iterable[str], name: str) -> tuple[set[str], set[str]]:
    return _ending_in(linear, name), _ending_in(other, name) or _ending_in(other, f"{name}.weight")


def shortest_names(chosen: Sequence[str], everything: Iterable[str], *, parts: int = 1) -> list[str]:
    """Return the shortest name suffixes of at least `parts` words that match exactly `chosen`, such as q_proj."""
    named, found = list(everything), set()
    for name in chosen:
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(parts, len(words) + 1))
        found.add(next(end for end in ends if _ending_in(named, end) <= set(chosen)))
    return sorted(found)


def _ending_in(names: Iterable[str], end: str) -> set[str]:
    return {name for name in names if name == end or name.endswith(f".{end}")}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _means_another(model: PreTrainedModel, leaf: str) -> bool:
    """Return whether peft maps this linear layer name to an expert weight, for compatibility with old adapters."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # "cannot convert gate_proj without up_proj"
        return True
    return set(config.target_modules or ()) != {leaf}


def _require_adaptable(model: PreTrainedModel, weight: str, parameter: nn.Parameter) -> None:
    own = {p for module in (lm_head(model), model.get_input_embeddings()) for p in module.parameters()}
    if parameter in own:
        raise ConfigError(
            f"--lora-targets names {weight}: embedding and head take no adapter, because log-probabilities are "
            "computed from the head's weight itself: remove it, or train them whole by --lora-modules-to-save"
        )
    if parameter.dim() not in (2, 3):
        raise ConfigError(f"--lora-targets names {weight}, which is not a matrix, and peft adapts matrices: remove it")
