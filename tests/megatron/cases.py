"""Small models for these tests, and a model of megatron-core of each, in the rank processes that a test spawns.

The shims of megatron-core are of a process: nothing here may run in the process of pytest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdptrain.errors import FsdptrainError
from fsdptrain.megatron.config import MegatronConfig
from tests import families, zoo
from tests.testing import save_hub

VOCAB_SIZE = 263  # odd: tensor parallel must pad it
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "has_engine": False, "on_cpu": True}  # of transformer_config
_PATIENCE = 900.0  # [s] of ranks for each other: their test ends sooner
_TWO_OF_EACH = {  # of a width at which float32 has 5 digits of the gradients of A_log and dt_bias: they nearly cancel
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "hidden_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
}
_AXES = {"mrope_section": [2, 1, 1]}  # of Qwen3.5, which knows images


def config(family: str, **changes: Any) -> PreTrainedConfig:
    if family in RECURRENT:
        found = families.config(family, **(_TWO_OF_EACH | changes))
        found.rope_parameters |= _AXES if family != "qwen3_next" else {}
        return found
    return zoo.config(family, **changes)


def save(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint whose every parameter is random, with a vocabulary that nothing divides."""
    torch.manual_seed(seed)
    made = config(family, **({"vocab_size": VOCAB_SIZE} | changes))
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    zoo.randomize(model, seed)
    return save_hub(model, folder)


class Built(NamedTuple):
    stock: PreTrainedModel
    model: Any  # GPTModel
    weights: Any  # WeightMap


def start(**split: Any) -> MegatronConfig:
    """In a rank's process: the groups of megatron-core."""
    from fsdptrain.megatron.cpu_shims import install_cpu_shims
    from fsdptrain.megatron.groups import start_groups

    install_cpu_shims()
    found = MegatronConfig(**split)
    start_groups(found, timeout_s=_PATIENCE)
    return found


def build(folder: Path, **split: Any) -> Built:
    """The model of transformers, and that of megatron-core with its weights."""
    from fsdptrain.megatron.model import build_model
    from fsdptrain.megatron.transformer_config import transformer_config
    from fsdptrain.megatron.weights import WeightMap, hub_shapes, open_files

    chosen, found = start(**split), AutoConfig.from_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = build_model(transformer_config(found, chosen, **OPTIONS), found, spec=chosen.spec)
    weights = WeightMap(model, stock)
    with open_files(folder, hub_shapes(stock)) as source:
        weights.load(source)
    return Built(stock, model, weights)


def parity(found: PreTrainedConfig, split: MegatronConfig, **options: Any) -> float:
    """How far the logprobs of a small random copy are from those of transformers, where groups were started."""
    from fsdptrain.megatron.parity import check_parity, small_models

    chosen = OPTIONS | options
    return check_parity(*small_models(found, split, chosen, device=torch.device("cpu")), split, chosen)[0]


def refusal(act: Callable[[], object]) -> str:
    """Class and words of what `act` raises; nothing where it does not."""
    try:
        act()
    except FsdptrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tokens(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (rows, columns), generator=torch.Generator().manual_seed(seed))
