"""The processor of a checkpoint: map text with image placeholders and images to token ids and tower inputs.

Only its tokenizer and image processor are loaded. The video part of the Qwen processors needs torchvision, and videos
are not supported. The image processors of transformers have a variant that needs only Pillow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from fsdptrain.errors import ConfigError
from fsdptrain.features.vision.tower import TYPES, generation_inputs
from fsdptrain.model.loading.materialize import quiet_transformers
from fsdptrain.types import Images, Segment

if TYPE_CHECKING:
    from PIL.Image import Image

_NOT_FOR_THE_TOWER = {"input_ids", "attention_mask", *TYPES}
_PROBE_SIZES = ((84, 56), (56, 112), (84, 56))  # [pixels]; the last has the size of the first
_BLANK_SIZE = (32, 32)


class ImageProcessor:
    """The image processor of one checkpoint."""

    def __init__(self, checkpoint: Path, *, trust_remote_code: bool, image_key: str) -> None:
        """image_key: column of the images. Raises ConfigError if the checkpoint has no image processor."""
        self.image_key = image_key
        try:
            with quiet_transformers():
                self._processor: Any = _load(checkpoint, trust_remote_code)
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--image-key: {checkpoint} has no image processor that can be loaded: {reason}"
            ) from error
        if getattr(self._processor, "image_processor", None) is None:  # for a text-only model it is a tokenizer
            raise ConfigError(f"--image-key: {checkpoint} has no image processor: it is a text-only model")
        from PIL import Image

        blank = self.read(self._processor.image_token, [Image.new("RGB", _BLANK_SIZE)]).images
        assert blank is not None
        self.blank = blank  # a small black image, for packs without images

    @property
    def chat_template(self) -> str | None:
        """The chat template, or None for that of the tokenizer."""
        return self._processor.chat_template

    def read(self, text: str, images: Sequence["Image"]) -> Segment:
        """Encode `text` with one placeholder per picture. Raises ValueError if their numbers differ."""
        made = self._processor(
            text=[text],
            images=list(images) or None,
            return_tensors="pt",
            add_special_tokens=False,
            return_mm_token_type_ids=True,
        )
        if not images:
            return Segment(made["input_ids"][0].tolist())
        types = next(made[name] for name in TYPES if name in made)[0].to(torch.int64)
        inputs: dict[str, Tensor] = {k: v for k, v in made.items() if k not in _NOT_FOR_THE_TOWER}
        return Segment(made["input_ids"][0].tolist(), Images(inputs, types))

    def probe_segments(self, vocab_size: int) -> list[Segment]:
        """Return two sequences with an image each, and a twin of the first with other words and another image."""
        generator = torch.Generator().manual_seed(1)
        return [self._probe_segment(size, vocab_size, generator) for size in _PROBE_SIZES]

    generation_inputs = staticmethod(generation_inputs)

    def _probe_segment(self, size: tuple[int, int], vocab_size: int, generator: torch.Generator) -> Segment:
        from PIL import Image

        width, height = size
        pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy()
        shown = self.read(self._processor.image_token, [Image.fromarray(np.ascontiguousarray(pixels))])
        before, behind = (torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (5, 14))
        assert shown.images is not None
        types = torch.cat([torch.zeros(5, dtype=torch.int64), shown.images.token_types])
        return Segment([*before, *shown.token_ids, *behind], Images(shown.images.inputs, types))


def _load(checkpoint: Path, trust_remote_code: bool) -> Any:
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        return AutoProcessor.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    stock: type[ProcessorMixin] = getattr(transformers, name)
    parts = [part for part in stock.get_attributes() if part != "video_processor"]
    without_video = type(name, (stock,), {"get_attributes": classmethod(lambda _: parts)})
    return without_video.from_pretrained(checkpoint)  # pyright: ignore[reportAttributeAccessIssue]
