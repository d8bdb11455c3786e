"""Options of prompts with images."""

from typing import Annotated

from fsdptrain.config.rules import COLUMN, FSDP_ONLY, Excludes, IdleWith, Requires
from fsdptrain.config.section import Section

_TARGETS = "name layers of the tower by --lora-targets, e.g. all-linear visual.merger.linear_fc1"


class VisionConfig(Section):
    """Prompts with images."""

    NAME = "vision"
    RULES = (FSDP_ONLY,)

    image_key: Annotated[
        str | None,
        COLUMN,
        Requires("apply_chat_template", fix="only the template knows how a prompt shows an image"),
        Excludes("environment", "environment_command"),
        Requires("rollout_engine=auto|hf", fix="use --rollout-engine hf"),
    ] = None
    """Column of the images of a prompt: one or a list of file paths, bytes, or images opened by `datasets`. `<image>`
    in the prompt marks each position; without marks, images come first. See docs/vision.md."""
    train_vision: Annotated[bool, Requires("image_key"), IdleWith("lora_rank", fix=_TARGETS)] = False
    """Also train the vision tower and its projector, which are frozen otherwise. Needs --image-key."""

    @property
    def enabled(self) -> bool:
        return self.image_key is not None

    @property
    def runs_tower(self) -> bool:
        return self.enabled

    @property
    def trains_tower(self) -> bool:
        return self.train_vision

    @property
    def needs_embedded_engine(self) -> bool:
        return self.enabled
