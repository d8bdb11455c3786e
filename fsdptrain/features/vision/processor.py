"""The processor of a checkpoint: from a text with marks and its pictures to token ids and what the tower reads.

Only its tokenizer and its image part are loaded. The video part of the Qwen processors needs torchvision, and no video
is read here; the image parts of transformers have a form that needs nothing but Pillow.
"""

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.model.loading.materialize import quiet_transformers
from fsdptrain.types import Images

if TYPE_CHECKING:
    from PIL.Image import Image

_TYPES = ("mm_token_type_ids", "token_type_ids")
_NOT_FOR_THE_TOWER = {"input_ids", "attention_mask", *_TYPES}
_PROBE_SIZES = ((84, 56), (56, 112), (84, 56))  # of pictures, in pixels; the last is like the first
_BLANK_SIZE = (32, 32)


class Segment(NamedTuple):
    """A sequence of tokens with the images that it shows."""

    token_ids: list[int]
    images: Images | None = None


def open_processor(config: Config, checkpoint: Path) -> "ImageProcessor | None":
    """For prompts with images; None without --image-key. ConfigError where there is none."""
    if config.data.image_key is None:
        return None
    return ImageProcessor(checkpoint, trust_remote_code=config.model.trust_remote_code)


class ImageProcessor:
    """Of one checkpoint."""

    def __init__(self, checkpoint: Path, *, trust_remote_code: bool) -> None:
        """ConfigError where there is none, or no Pillow."""
        if importlib.util.find_spec("PIL") is None:
            raise ConfigError("--image-key needs the Pillow package: pip install 'fsdptrain[vision]'")
        try:
            with quiet_transformers():
                self._processor: Any = _load(checkpoint, trust_remote_code)
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--image-key: {checkpoint} has no image processor that can be loaded: {reason}"
            ) from error
        if getattr(self._processor, "image_processor", None) is None:  # of a model of text alone it is a tokenizer
            raise ConfigError(f"--image-key: {checkpoint} has no image processor: it is a model of text alone")

    @property
    def chat_template(self) -> str | None:
        """None: the one of the tokenizer."""
        return self._processor.chat_template

    def read(self, text: str, pictures: Sequence["Image"]) -> Segment:
        """`text` with as many places of images as there are pictures. ValueError where they do not match."""
        made = self._processor(
            text=[text],
            images=list(pictures) or None,
            return_tensors="pt",
            add_special_tokens=False,
            return_mm_token_type_ids=True,
        )
        if not pictures:
            return Segment(made["input_ids"][0].tolist())
        types = next(made[name] for name in _TYPES if name in made)[0].to(torch.int64)
        inputs: dict[str, Tensor] = {k: v for k, v in made.items() if k not in _NOT_FOR_THE_TOWER}
        return Segment(made["input_ids"][0].tolist(), Images(inputs, types))

    @cached_property
    def blank(self) -> Images:
        """A small picture without anything on it."""
        from PIL import Image

        images = self.read(self._processor.image_token, [Image.new("RGB", _BLANK_SIZE)]).images
        assert images is not None
        return images

    def probe_segments(self, vocab_size: int) -> list[Segment]:
        """Two sequences with a picture each, and a twin of the first with other words and another picture."""
        generator = torch.Generator().manual_seed(1)
        return [self._probe_segment(size, vocab_size, generator) for size in _PROBE_SIZES]

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
