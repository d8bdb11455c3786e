"""Registry of losses. Each is one function: (batch, logprobs, config) -> LossOutput.

To add a loss, write a function that returns `policy_loss(...)` (fsdptrain.algo.objective), register it here, and list
the options that it reads in fsdptrain/config/presets.py. Alternatively, pass `--loss my_package.losses:mine`, which
needs neither.
"""

from typing import TYPE_CHECKING

from fsdptrain.errors import ConfigError
from fsdptrain.registry import Table
from fsdptrain.types import LossOutput

if TYPE_CHECKING:
    from fsdptrain.protocols import Loss

_WEIGHTED = "fsdptrain.algo.weighted_losses"

LOSSES: "Table[Loss]" = Table(
    {
        "grpo": "fsdptrain.algo.clipped_losses:grpo",
        "gspo": "fsdptrain.algo.sequences:gspo",
        "cispo": f"{_WEIGHTED}:cispo",
        "sapo": f"{_WEIGHTED}:sapo",
        "prime_rl": f"{_WEIGHTED}:prime_rl",
        "reinforce": f"{_WEIGHTED}:reinforce",
        "sft": f"{_WEIGHTED}:sft",
    }
)


def checked(output: LossOutput) -> LossOutput:
    """Return the output of a loss. Raises ConfigError if a loss of the user returned something else."""
    if isinstance(output, LossOutput):
        return output
    raise ConfigError(f"--loss returned {type(output).__name__}, not LossOutput: return policy_loss(...)")
