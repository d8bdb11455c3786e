"""Bare config.json files of public models, written by hand: see data/configs/README.md."""

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from fsdptrain.model.loading.meta import model_from_config

CONFIGS = Path(__file__).parent / "data" / "configs"


def meta_model(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return model_from_config(AutoConfig.from_pretrained(CONFIGS / name), dtype=torch.float32)
