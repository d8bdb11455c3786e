"""Section of supervised fine-tuning."""

from typing import TYPE_CHECKING, Literal

from fsdptrain.config.rules import Requires
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

LossOn = Literal["assistant", "last", "all"]


class SftConfig(Section):
    """Supervised fine-tuning: trained tokens."""

    NAME = "sft"
    PREFIX = "sft_"
    RULES = (Requires("algorithm=sft"),)

    loss_on: LossOn = "assistant"
    """Tokens with a loss: those of all assistant turns, of the last one, or all tokens. Plain text: all."""


def sft_options(config: "Config") -> SftConfig | None:
    """Return the options of supervised data, if the run is supervised."""
    return config.sft if config.algorithm.algorithm == "sft" else None
