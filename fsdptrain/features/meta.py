"""The model of a run on the meta device, for checks that need only its config.json."""

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.hub import resolve_config
from fsdptrain.model.loading.meta import build_meta_model


def meta_model_of(config: Config) -> PreTrainedModel:
    """Build the model of --hf-checkpoint on the meta device; its config.json is enough. Collective."""
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {config.model.hf_checkpoint}"):
        path = resolve_config(config.model.hf_checkpoint)
    return build_meta_model(path, trust_remote_code=config.model.trust_remote_code, attn_implementation="eager")
