"""The vision feature: prompts contain images, and the vision tower encodes them in the policy's forward."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature, Rows
from fsdptrain.features.sections import VisionConfig
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.features.vision.tower import Vision
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.protocols import ForwardRole
from fsdptrain.types import PackedBatch


class VisionFeature(Feature):
    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._vision: Vision | None = None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "VisionFeature":
        with raise_on_all_ranks(ConfigError, "--image-key"):
            options = config.section(VisionConfig)
            assert options.image_key is not None, "the feature is enabled"
            trust = config.model.trust_remote_code
            processor = ImageProcessor(checkpoint, trust_remote_code=trust, image_key=options.image_key)
            return cls(processor)

    @property
    def prompt_processor(self) -> ImageProcessor:
        return self._processor

    def transform_model(self, model: PreTrainedModel, meshes: Meshes | None = None) -> None:
        self._vision = Vision(model, self._processor.blank)

    def forward(
        self, batch: PackedBatch, rows: Rows, role: ForwardRole, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        assert self._vision is not None
        inputs.update(self._vision.inputs(batch, rows))
        return nullcontext()
