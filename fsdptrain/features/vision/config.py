"""Options of prompts with images."""

from typing import Annotated

from fsdptrain.config.rules import COLUMN, FSDP_ONLY, Excludes, Fact, IdleWith, Package, Requires
from fsdptrain.config.section import Section

_TARGETS = "name layers of the tower by --lora-targets, e.g. all-linear visual.merger.linear_fc1"


class VisionConfig(Section):
    """Prompts with images."""

    NAME = "vision"
    RULES = (FSDP_ONLY,)
    FACTS = (
        (Fact.RUNS_TOWER, "image_key"),
        (Fact.TRAINS_TOWER, "train_vision"),
        (Fact.EMBEDDED_ENGINE, "image_key"),
    )

    image_key: Annotated[
        str | None,
        COLUMN,
        Package("PIL", "vision"),
        Requires("apply_chat_template", fix="only the template knows how a prompt shows an image"),
        Excludes("environment", "environment_command"),
        Requires("rollout_engine=auto|hf", fix="use --rollout-engine hf"),
    ] = None
    """Column of the images of a prompt: one or a list of file paths, bytes, or images opened by `datasets`. `<image>`
    in the prompt marks each position; without marks, images come first. See docs/vision.md."""
    train_vision: Annotated[bool, Requires("image_key"), IdleWith("lora_rank", fix=_TARGETS)] = False
    """Also train the vision tower and its projector, which are frozen otherwise. Needs --image-key."""
