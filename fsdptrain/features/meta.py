"""The model of a run on the meta device, for checks that need only its config.json."""

from pathlib import Path

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.model.loading.meta import build_meta_model


def meta_model_of(checkpoint: Path, config: Config) -> PreTrainedModel:
    """Build the model of `checkpoint`, the folder of --hf-checkpoint, on the meta device."""
    return build_meta_model(checkpoint, trust_remote_code=config.model.trust_remote_code, attn_implementation="eager")
