"""Small models for these tests, and a model of megatron-core of each, in the rank processes that a test spawns.

The shims of megatron-core are of a process: nothing here may run in the process of pytest.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.testing import tiny_tokenizer
from tests import zoo

FAMILIES = ("qwen3", "llama", "qwen3_moe")
VOCAB_SIZE = 263  # odd: tensor parallel must pad it


def save(family: str, folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """A checkpoint whose every parameter is random, with a vocabulary that nothing divides."""
    model = zoo.build(family, seed, **({"vocab_size": VOCAB_SIZE} | more))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Built(NamedTuple):
    stock: PreTrainedModel
    model: Any  # GPTModel
    weights: Any  # WeightMap


def build(folder: Path, **layout: Any) -> Built:
    """In a rank's process: the model of transformers, and that of megatron-core with its weights."""
    from fsdptrain.backends.megatron.cpu_shims import install_cpu_shims
    from fsdptrain.backends.megatron.groups import start_groups
    from fsdptrain.backends.megatron.model import build_model
    from fsdptrain.backends.megatron.transformer_config import transformer_config
    from fsdptrain.backends.megatron.weights import WeightMap, hub_shapes, open_files

    install_cpu_shims()
    split = MegatronConfig(**layout)
    config = AutoConfig.from_pretrained(folder)
    start_groups(split, timeout_s=60)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = build_model(transformer_config(config, split, dtype=torch.float32, has_engine=False, on_cpu=True), config)
    weights = WeightMap(model, config, hub_shapes(stock))
    with open_files(folder, hub_shapes(stock)) as source:
        weights.load(source)
    return Built(stock, model, weights)


def tokens(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (rows, columns), generator=torch.Generator().manual_seed(seed))
