"""`--dry-run --probe`: what the layout probe finds on a random copy, from config.json alone."""

from transformers import AutoConfig

from fsdptrain.errors import CheckpointError
from fsdptrain.model.probes.layout import probe_random_copy


def probe_line(checkpoint: str, *, trust_remote_code: bool) -> str:
    """The layout of the model, and how far it is from one by one, forward and backward; needs no weights, no GPU.

    Raises CheckpointError without a config.json, NumericsError where no layout is exact.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"--hf-checkpoint {checkpoint} has no config.json that can be read: {reason}") from error
    probe = probe_random_copy(config, trust_remote_code=trust_remote_code)
    return f"{probe.line}, backward {probe.gradient_difference:.2g}, on a small random copy on the CPU"
