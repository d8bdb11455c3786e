"""Small models for these tests, and a model of megatron-core of each, in the rank processes that a test spawns.

The shims of megatron-core are of a process: nothing here may run in the process of pytest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from fsdptrain.errors import FsdptrainError
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.model.loading.meta import model_from_config
from tests import families, zoo
from tests.testing import save_hub

VOCAB_SIZE = 263  # odd: tensor parallel must pad it
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # Qwen3.5 as released: with a vision part, and fused experts
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
        text = families.config(f"{family}_text".replace("next_text", "next"), **(_TWO_OF_EACH | changes))
        if family == "qwen3_next":
            return text
        text.rope_parameters |= _AXES
        tower = zoo.QWEN_TOWER | {"out_hidden_size": text.hidden_size, "num_position_embeddings": 64}
        tied = text.tie_word_embeddings
        found = CONFIG_MAPPING[family](text_config=text.to_dict(), vision_config=tower, tie_word_embeddings=tied)
        found.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(found)].__name__]
        return found
    return zoo.config(family, **changes) if family in zoo.CONFIGS else families.config(family, **changes)


def save(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint whose every parameter is random, with a vocabulary that nothing divides."""
    torch.manual_seed(seed)
    made = config(family, **({"vocab_size": VOCAB_SIZE} | changes))
    model = model_from_config(made, dtype=torch.float32)
    zoo.randomize(model, seed)
    save_hub(model, folder)
    if family == "qwen3_5_moe":
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    """The model of transformers, which names its tensors as one that was made from its config."""
    found = AutoConfig.from_pretrained(folder)
    auto = AutoModelForCausalLM if found.get_text_config() is found else AutoModelForImageTextToText
    model = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    vars(model).pop("_weight_conversions", None)
    model.config.get_text_config().use_cache = False  # a cache needs an attention
    return model


class Built(NamedTuple):
    stock: PreTrainedModel
    model: Any  # the parts of this rank's stage
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
    from fsdptrain.megatron.hub_names import hub_state, shapes_of
    from fsdptrain.megatron.model import build_model
    from fsdptrain.megatron.transformer_config import text_config, transformer_config
    from fsdptrain.megatron.weights import WeightMap, open_files

    chosen, stock = start(**split), load(folder)
    found = text_config(stock.config)
    model = build_model(transformer_config(found, chosen, **OPTIONS), found, spec=chosen.spec)
    weights = WeightMap(model, stock, bridge=chosen.bridge)
    assert not weights.converter.fell_back, weights.converter.line
    with open_files(folder, shapes_of(hub_state(stock))) as source:
        weights.load(source)
    return Built(stock, model, weights)


def parity(found: PreTrainedConfig, split: MegatronConfig, **options: Any) -> float:
    """How far the logprobs of a small random copy are from those of transformers, where groups were started."""
    from fsdptrain.megatron.parity import check_parity, small_models
    from fsdptrain.megatron.transformer_config import text_config

    chosen, found = OPTIONS | options, text_config(found)
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
