"""`fsdptrain export`: a checkpoint of a run becomes a folder that from_pretrained reads."""

from pathlib import Path
from typing import Any

from fsdptrain import platform
from fsdptrain.config import load_recipe
from fsdptrain.errors import CheckpointError
from fsdptrain.models.lora import require_peft
from fsdptrain.trainer.backend import build_backend
from fsdptrain.trainer.folder import CONFIG_FILE


def export_checkpoint(checkpoint: Path, output: Path, **choices: Any) -> None:
    """Write the model of `checkpoint` (<output_dir>/checkpoints/step_*) to `output`, by its run's configuration.

    choices: options, by flat key, that win over it.
    """
    recipe = checkpoint.resolve().parent.parent / CONFIG_FILE
    if not recipe.is_file():
        raise CheckpointError(f"--checkpoint {checkpoint} is not in the folder of a run: {recipe} is not there")
    no_reference = {"kl_loss_coef": 0.0, "kl_reward_coef": 0.0}
    config = load_recipe(recipe, **no_reference, fsdp_replicate_size=1, **choices)  # and so any number of processes
    if config.lora.rank:
        require_peft()
    with platform.process_group(config.launch.dist_timeout):
        backend = build_backend(config)
        backend.load(checkpoint)
        backend.export(output)
