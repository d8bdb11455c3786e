"""`fsdptrain export`: convert a checkpoint of a run to a folder that from_pretrained reads."""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.checkpoints import CONFIG_FILE, PROGRESS_FILE
from fsdptrain.config import check_world_size
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import load_recipe
from fsdptrain.config.rules import NOT_EXPORTED, Condition, Fact, Requires
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError, ConfigError
from fsdptrain.fsdp.export_folder import check_target
from fsdptrain.model.loading.files import resolve_checkpoint
from fsdptrain.trainer.backend import build_backend
from fsdptrain.trainer.inputs import MODEL, digest_model
from fsdptrain.trainer.resuming import read_progress

log = logging.getLogger(__name__)


def export_checkpoint(checkpoint: Path, output: Path, **choices: Any) -> None:
    """Write the model of `checkpoint` (<output_dir>/checkpoints/step_*) to `output` as a Hugging Face folder.

    Uses the configuration of the run that wrote the checkpoint, except for options that would run code: the folder may
    come from somebody else. Reads no state of the optimizer.

    choices: options that override that configuration, by flat key.
    """
    recipe = checkpoint.resolve().parent.parent / CONFIG_FILE
    if not recipe.is_file():
        raise CheckpointError(f"--checkpoint {checkpoint} is not in the folder of a run: {recipe} is not there")
    no_reference = {"kl_loss_coef": 0.0}
    not_exported = {key.flat: key.default for key in all_keys().values() if NOT_EXPORTED in key.field.metadata}
    config = load_recipe(recipe, **{**no_reference, **not_exported, "fsdp_replicate_size": 1, **choices})
    config = config.with_values(optimizer="sgd", offload_optimizer=False)  # has no state
    with platform.process_group(config.launch.dist_timeout):
        with raise_on_all_ranks(CheckpointError, f"--output {output}"):
            if dist.get_rank() == 0:
                sources = (config.model.hf_checkpoint, config.ref.load)
                check_target(output, flag=f"--output {output}", sources=sources)
        model = resolve_checkpoint(config.model.hf_checkpoint)
        with raise_on_all_ranks(CheckpointError, f"--checkpoint {checkpoint}"):
            if dist.get_rank() == 0 and (checkpoint / PROGRESS_FILE).is_file():
                digest = digest_model(model)
                if read_progress(checkpoint).get("inputs", {}).get(MODEL, digest) != digest:
                    line = f"--checkpoint {checkpoint}: {MODEL} have changed since it was written"
                    if config.has(Fact.FROZEN_WEIGHTS):
                        raise CheckpointError(f"{line}, and it holds only an adapter of them: restore them")
                    log.warning("%s: config and tokenizer are the new ones", line)
        try:
            check_world_size(config, dist.get_world_size())
        except ConfigError as error:  # checkpoints do not depend on the parallel sizes
            log.info("the model is loaded undivided, unlike in the run: %s", error)
            groups = {group.key: 1 for group in config.rank_groups}
            split = {Condition.parse(f"{key}>1") for key in groups}
            rules = [(key, rule) for key in all_keys().values() for rule in key.rules if isinstance(rule, Requires)]
            idle = {key.flat: key.default for key, rule in rules if split & {*rule.conditions}}
            config = config.with_values(**groups, **idle)
        backend = build_backend(config)
        backend.load(checkpoint)
        backend.export(output)
