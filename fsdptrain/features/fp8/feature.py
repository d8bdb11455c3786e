"""Linear layers computed in 8-bit floats by torchao, in training.

Weights, gradients, optimizer and checkpoints stay as they are. The layers change after the probes, which compare
layouts up to rounding: 8-bit floats differ by more.
"""

import logging
from dataclasses import replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.features.fp8.config import Fp8Config
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.policy import evaluating, plain_batch, policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import decoder_layers, expert_choice, reshard

log = logging.getLogger(__name__)

_ADA = (8, 9)  # the first GPUs with products of 8-bit floats
_MULTIPLE = 16  # of inputs and outputs: a limit of the kernels
_LEAST = 32  # inputs and outputs; casts of smaller layers cost more than the product saves
_ROUTERS = {"gate", "router"}  # in the name of a layer; choices should not depend on rounding
_LENGTHS = (40, 23)  # of the sequences that the difference is reported for


class Fp8Feature(Feature):
    def __init__(self, options: Fp8Config) -> None:
        self._options = options
        self._found: list[nn.Linear] = []

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "Fp8Feature":
        del checkpoint
        with raise_on_all_ranks(ConfigError, "--fp8 training"):
            if find_spec("torchao") is None:
                raise ConfigError("--fp8 training needs the torchao package: pip install 'fsdptrain[torchao]'")
            if platform.device_type() == "cuda" and torch.cuda.get_device_capability() < _ADA:
                found = ".".join(map(str, torch.cuda.get_device_capability()))
                raise ConfigError(
                    f"--fp8 training needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this one has "
                    f"{found}: remove it"
                )

        return cls(config.section(Fp8Config))

    def transform_model(self, model: PreTrainedModel, meshes: Meshes) -> None:
        """Find the layers. `verify` changes them."""
        del meshes
        self._found = self._layers(model)

    def verify(self, model: PreTrainedModel, probe: LayoutProbe, vocab_size: int) -> None:
        """Change the layers, and measure by how much logprobs of random tokens change. Collective."""
        before = _logprobs(model, probe.layout, vocab_size)
        for layer in self._found:
            _convert(layer)
        difference = (_logprobs(model, probe.layout, vocab_size) - before).abs().mean().item()
        emulated = "" if platform.device_type() == "cuda" else ", emulated"
        log.info(
            f"fp8 rowwise{emulated}: {len(self._found)} linear layers; logprobs of random tokens "
            f"differ by {difference:.2g} from those without"
        )

    def _layers(self, model: PreTrainedModel) -> list[nn.Linear]:
        inside = {module for layer in decoder_layers(model) for module in layer.modules()}
        linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m in inside}
        for pattern in self._options.fp8_skip:
            if not any(_matches(name, pattern) for name in linear):
                raise ConfigError(f"--fp8-skip {pattern}: no linear layer of {type(model).__name__} has this name")
        choice = expert_choice(model.config)
        found = [
            module
            for name, module in linear.items()
            if not any(_matches(name, pattern) for pattern in self._options.fp8_skip)
            and not (_ROUTERS & set(name.split(".")) or (choice and module.out_features == choice.num_experts))
            and all(size >= _LEAST and size % _MULTIPLE == 0 for size in (module.in_features, module.out_features))
        ]
        if not found:
            raise ConfigError(
                f"--fp8 training: {type(model).__name__} has no linear layer left whose inputs and outputs are "
                f"multiples of {_MULTIPLE} and at least {_LEAST}: remove it"
            )
        return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` is the name of a layer, its end, or a pattern of shells."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatch(name, pattern)


def _convert(layer: nn.Linear) -> None:
    """Change `layer` to torchao's class in place: FSDP2 refers to the module and its parameters."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = platform.device_type() != "cuda"
    # The gradient of the weight sums over the tokens of a pack, whose number is no multiple of 16.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=emulate)
    with torch.device("meta"):
        like = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE, bias=False), config=config)
    assert isinstance(like, nn.Linear)
    own = ("config", "linear_mm_config", "scaling_type_input", "scaling_type_weight", "scaling_type_grad_output")
    vars(layer).update({name: vars(like)[name] for name in own})
    layer.__class__ = type(like)


@torch.no_grad()
def _logprobs(model: PreTrainedModel, layout: Layout, vocab_size: int) -> torch.Tensor:
    """Return the logprobs of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]
    reshard(model)
    with evaluating(model):
        return policy_logprobs(model, plain_batch(tokens, device=platform.local_device()), layout=layout).values
