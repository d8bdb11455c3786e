"""`--dry-run --probe`: run the layout probe on a small random copy, from config.json alone."""

from transformers import AutoConfig

from fsdptrain.errors import CheckpointError
from fsdptrain.model.probes.copy_probe import probe_random_copy


def probe_line(checkpoint: str, *, trust_remote_code: bool) -> str:
    """Return the layout of the model and its numerical differences, forward and backward. Needs no weights and no GPU.

    Raises CheckpointError if there is no config.json, and NumericsError if no layout is exact.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"--hf-checkpoint {checkpoint} has no config.json that can be read: {reason}") from error
    probe = probe_random_copy(config, trust_remote_code=trust_remote_code)
    return f"{probe.line}, backward {probe.gradient_difference:.2g}, on a small random copy on the CPU"
