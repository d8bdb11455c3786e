"""Compare the built model with the transformers config. Any disagreement stops the run before its first step.

Values are read from the modules that compute, not from the config that they were built from. What changes logprobs
(rotary embeddings, routers) is compared by `parity`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.megatron import require_megatron
from fsdptrain.megatron.cpu_shims import replaced
from fsdptrain.megatron.groups import owners, process_groups
from fsdptrain.megatron.model import has_transformer_engine, padded_vocab
from fsdptrain.model.probes.kernels import Kernel, recurrent_kernels

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class BuildReport:
    """The report of the whole model."""

    lines: Sequence[str]
    kernels: list[Kernel]


@dataclass(frozen=True)
class Fact:
    """One value that must agree."""

    name: str
    found: object  # in megatron-core
    wanted: object  # in transformers

    @property
    def agrees(self) -> bool:
        if isinstance(self.found, float) and isinstance(self.wanted, float):
            return math.isclose(self.found, self.wanted, rel_tol=1e-6)
        return self.found == self.wanted

    @property
    def problem(self) -> str:
        if isinstance(self.wanted, bool):
            return f"{self.name}: {'no' if self.wanted else 'yes'}"
        return f"{self.name} is {self.found}, not {self.wanted}"


def build_report(model: "GPTModel", stock: PreTrainedModel, *, layout: str) -> BuildReport:
    """Build the report. `stock`: the transformers model on meta. Collective.

    Raises ConfigError on all ranks, listing all disagreements.
    """
    config = stock.config
    facts = [*_parameters(model, stock)]
    with raise_on_all_ranks(ConfigError, "--backend megatron"):
        facts += _norms(model, config)
        tied = bool(model.share_embeddings_and_output_weights)
        facts.append(Fact("tied head", tied, bool(config.tie_word_embeddings)))
        wrong = list(dict.fromkeys(fact.problem for fact in facts if not fact.agrees))
        if wrong:
            raise ConfigError(
                f"--backend megatron: the model that was built is not that of config.json: {'; '.join(wrong)}: use "
                "--backend fsdp"
            )
    engine = has_transformer_engine()
    facts_line = dict.fromkeys(f"{fact.name} {fact.found}" for fact in facts if not isinstance(fact.found, bool))
    padding = padded_vocab(config.vocab_size, model.config.tensor_model_parallel_size) - config.vocab_size
    lines = [
        f"megatron-core {require_megatron()}, {'Transformer Engine' if engine else 'plain'} layers, {layout} rows; "
        f"{_sizes(process_groups())}",
        f"modules: {_classes(model)}",
        f"as config.json says: {', '.join(facts_line)}; vocabulary padded by {padding}",
    ]
    shims = replaced()
    lines += [f"{len(shims)} shims: {', '.join(shims)}"] if shims else []
    return BuildReport(lines, _kernels(model, stock, engine=engine))


def _sizes(groups: "ProcessGroupCollection") -> str:
    names = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp_cp"}
    sizes = ", ".join(f"{name} {vars(groups)[key].size()}" for name, key in names.items())
    return f"{dist.get_world_size()} ranks: {sizes}"


def _parameters(model: "GPTModel", stock: PreTrainedModel) -> Iterator[Fact]:
    """Compare the parameter count over all ranks, each value counted once. Collective."""
    groups, config = process_groups(), stock.config
    own = 0.0
    for p in model.parameters():
        replicas = groups.dp_cp if vars(p).get("allreduce", True) else groups.expt_dp  # experts: no all-reduce
        copies = owners(p, groups) * replicas.size()
        own += p.numel() / copies if copies else 0.0
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    rows = padded_vocab(config.vocab_size, groups.tp.size()) - config.vocab_size
    padding = rows * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    yield Fact("parameters", round(total.item()) - padding, sum(p.numel() for p in stock.parameters()))
    layers = [number for numbers in gather([layer.layer_number for layer in _layers(model)]) for number in numbers]
    yield Fact("layers", len(set(layers)), config.num_hidden_layers)


def _norms(model: "GPTModel", config: PreTrainedConfig) -> Iterator[Fact]:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):  # names in megatron-core and in most transformers models
            if name in vars(module):
                yield Fact("eps of norms", float(vars(module)[name]), float(config.rms_norm_eps))


def _layers(model: "GPTModel") -> list[Any]:
    return list(model.decoder.layers)


def _classes(model: nn.Module) -> str:
    """Count the modules of each class on this rank, except containers."""
    counts = Counter(type(module).__name__ for module in model.modules())
    return ", ".join(f"{count} {name}" for name, count in counts.items() if name not in ("ModuleList", "Identity"))


def _wrapped(model: "GPTModel", stock: PreTrainedModel) -> Iterator[Kernel]:
    """Describe the transformers mixers in the layers, and the fallbacks of their kernels."""
    modules = [module for module in model.modules() if "hub_name" in vars(module)]
    if modules:
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
        yield Kernel("mixers", f"of transformers, whole on each process: {names}")
        yield from recurrent_kernels(stock, platform.device_type())


def _kernels(model: "GPTModel", stock: PreTrainedModel, *, engine: bool) -> list[Kernel]:
    """Describe the kernels. `stock`: the transformers model, whose layers determine the kernels of its mixers."""
    found = list(_wrapped(model, stock))
    if not engine and platform.has_accelerator():
        parts = "MLP and experts" if found else "attention, norms and experts"
        found.append(Kernel(parts, "plain torch", "Transformer Engine", "it does not import here"))
    elif not found:
        found = [Kernel("attention", f"megatron-core, {'Transformer Engine' if engine else 'plain torch'}")]
    if model.config.num_moe_experts:
        found.append(Kernel("experts", f"megatron-core, {model.config.moe_token_dispatcher_type}"))
    return found
