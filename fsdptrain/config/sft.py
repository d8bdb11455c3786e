"""Section of supervised fine-tuning."""

from typing import TYPE_CHECKING, Annotated, Literal

from fsdptrain.config.rules import NEUTRAL, IdleWith, Requires
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

LossOn = Literal["assistant", "last", "all"]


class SftConfig(Section):
    """Supervised fine-tuning: form of the data, trained tokens, evaluation."""

    NAME = "sft"
    PREFIX = "sft_"
    RULES = (Requires("algorithm=sft"),)

    loss_on: LossOn = "assistant"
    """Tokens with a loss: those of all assistant turns, of the last one, or all tokens. Plain text: all."""
    eval_generate: Annotated[bool, NEUTRAL, Requires("eval_interval"), IdleWith("eval_size=0")] = False
    """Also generate responses to the held-out prompts and reward them, with an engine. Needs a prompt and a label."""


def sft_options(config: "Config") -> SftConfig | None:
    """Return the options of supervised data, if the run is supervised."""
    return config.sft if config.algorithm.algorithm == "sft" else None
