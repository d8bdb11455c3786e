"""The reference model of --ref-load: loaded before the policy, and compared with it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdptrain.config import Config
from fsdptrain.enabled_features import Features
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.build import load_model
from fsdptrain.fsdp.checkpoint import describe, fingerprint
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.fsdp.reference import ReferenceBank
from fsdptrain.model.loading.files import resolve_checkpoint


def load_bank(config: Config, features: Features, meshes: Meshes) -> tuple[ReferenceBank, dict[str, Any]]:
    """Load the weights of --ref-load. Returns them and their fingerprint; the sharded model is freed. Collective."""
    assert config.ref.load is not None
    cutting = Features([feature for feature in features if feature.cuts_parameters])
    with named_in_errors("--ref-load"):
        path = resolve_checkpoint(config.ref.load)
        loaded = load_model(config.with_values(freeze=[], lr_scale={}), path, meshes, features=cutting)
        bank, found = ReferenceBank(loaded), fingerprint(loaded)
    del loaded
    gc.collect()  # modules and FSDP hooks form reference cycles
    return bank, found


def require_shapes(model: nn.Module, config: Config, features: Features, found: dict[str, Any]) -> None:
    """Raise CheckpointError unless --ref-load, of fingerprint `found`, has the shapes of `model`."""
    with features.without():
        own = fingerprint(model)
    if found != own:
        line = f"--ref-load {config.ref.load} is {describe(found)}, but --hf-checkpoint is {describe(own)}"
        raise CheckpointError(f"{line}: the reference must have the same shapes")


@contextmanager
def named_in_errors(source: str) -> Iterator[None]:
    """Let a CheckpointError that begins with --hf-checkpoint begin with `source`, whose files were read."""
    try:
        yield
    except CheckpointError as error:  # raised on all ranks
        text = str(error)
        found = text.removeprefix("--hf-checkpoint")
        raise CheckpointError(text if found == text else source + found) from error
