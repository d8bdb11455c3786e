"""The vision feature: prompts contain images, and the vision tower encodes them in the policy's forward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.feature import Feature
from fsdptrain.features.vision.config import VisionConfig
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.features.vision.tower import Vision, generation_inputs
from fsdptrain.fsdp.mesh import Meshes
from fsdptrain.model.rows import Rows
from fsdptrain.types import Images, PackedBatch, Prompt, Segment


class VisionFeature(Feature):
    def __init__(self, *, blank: Images, processor: ImageProcessor | None = None) -> None:
        """blank: an image for packs without images."""
        self._blank = blank
        self._processor = processor
        self._vision: Vision | None = None

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "VisionFeature":
        with raise_on_all_ranks(ConfigError, "--image-key"):
            options = config.section(VisionConfig)
            assert options.image_key is not None, "the feature is enabled"
            processor = ImageProcessor(
                checkpoint, trust_remote_code=config.model.trust_remote_code, image_key=options.image_key
            )
            return cls(blank=processor.blank, processor=processor)

    @property
    def prompt_processor(self) -> ImageProcessor | None:
        return self._processor

    def transform_model(self, model: PreTrainedModel, meshes: Meshes | None = None) -> None:
        del meshes
        self._vision = Vision(model, self._blank)

    def probe_segments(self, vocab_size: int) -> Sequence[Segment]:
        return () if self._processor is None else self._processor.probe_segments(vocab_size)

    def model_inputs(self, batch: PackedBatch, rows: Rows) -> Mapping[str, Any]:
        assert self._vision is not None
        return self._vision.inputs(batch, rows)

    def generation_inputs(
        self, model: PreTrainedModel, prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, positions: Tensor
    ) -> Mapping[str, Tensor]:
        return generation_inputs(model, prompts, ids, mask, positions)
