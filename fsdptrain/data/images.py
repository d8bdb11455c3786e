"""Images in data rows and their positions in a chat.

A column holds one image or a list of images. An image is a file path (relative to the data file unless absolute), its
bytes, the mapping of both that parquet files store, or an image that `datasets` has already opened.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdptrain.data.rows import Row, as_messages
from fsdptrain.errors import DataError
from fsdptrain.types import Images, Message, Prompt, Segment

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedModel

IMAGE_MARK = "<image>"  # position of the next image in a prompt


class PromptProcessor(Protocol):
    """Tokenizer of prompts that contain images, and what models need to read them."""

    image_key: str  # column of the images

    @property
    def chat_template(self) -> str | None:
        """Chat template, or None to use the tokenizer's."""
        ...

    def read(self, text: str, images: Sequence[Any]) -> Segment:
        """Tokenize `text` with its `images`. Raises ValueError if the number of image placeholders differs."""
        ...

    def probe_segments(self, vocab_size: int) -> Sequence[Segment]:
        """Return three sequences for which the layout must be exact; the third has the lengths of the first."""
        ...

    def generation_inputs(
        self, model: PreTrainedModel, prompts: Sequence[Prompt], ids: Tensor, mask: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        """Return more arguments for the forward pass over prompts [N, P], which stand at the right of their rows."""
        ...


def read_images(
    row: Row, processor: PromptProcessor, render: Callable[[list[Message]], str], *, column: str
) -> Segment:
    """Tokenize the chat of a row with its images, using the processor of the checkpoint. render: the chat template."""
    text = render(with_image_positions(as_messages(row.prompt), len(row.images), row_id=row.id))
    images = [open_image(one, row_id=row.id, column=column) for one in row.images]
    try:
        return processor.read(text, images)
    except (ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"the processor of --hf-checkpoint cannot render row {row.id}: {reason}") from error


def join_images(parts: Sequence[tuple[Images | None, int]]) -> Images | None:
    """Concatenate images of consecutive sequences.

    `parts` holds (images of the prompt, sequence length) for each sequence. Returns None if no sequence has images.
    """
    found = [images for images, _ in parts if images is not None]
    if not found:
        return None
    import torch

    types = torch.zeros(sum(length for _, length in parts), dtype=torch.int64)
    start = 0
    for images, length in parts:
        if images is not None:
            types[start : start + len(images.token_types)] = images.token_types
        start += length
    return Images({name: torch.cat([x.inputs[name] for x in found]) for name in found[0].inputs}, types)


def as_images(value: Any, folder: Path) -> tuple[Any, ...]:
    """Return the images of a cell, unopened. Resolves relative paths against `folder`."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_with_folder(one, folder) for one in values)


def open_image(value: Any, *, row_id: str, column: str) -> Image:
    """Open an image as RGB. Raises DataError if it is invalid."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Image.Image):
        return value.convert("RGB")
    source = _bytes_or_path(value)
    if source is None:
        raise DataError(
            f"--image-key {column}: row {row_id} holds a {type(value).__name__}; expected a path, bytes, or an image "
            "of `datasets`"
        )
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"--image-key {column}: the image of row {row_id} cannot be read: {error}") from error


def content_of(value: Any, *, reads_files: bool = False) -> str:
    """Return a key that is equal for the same image in the same form. Files are identified by their path, or read."""
    source = _bytes_or_path(value)
    if isinstance(source, Path):
        if not reads_files:
            return str(source)
        source = source.read_bytes() if source.is_file() else b""  # the error comes when the row is used
    return hashlib.sha256(value.tobytes() if source is None else source).hexdigest()


def with_image_positions(messages: Sequence[Message], count: int, *, row_id: str) -> list[Message]:
    """Return `messages` with image positions in the format of chat templates.

    Images replace `<image>` marks in the text. Without any mark, they precede the text of the first user message.
    Content that is a list of parts is unchanged. Raises DataError if the numbers of positions and images differ, or for
    a video.
    """
    parted = [{**m, "content": _parts(m["content"])} for m in messages]
    places = sum(part.get("type") == "image" for m in parted for part in m["content"])
    if any(part.get("type") not in ("image", "text") for m in parted for part in m["content"]):
        raise DataError(f"row {row_id}: a message has a part that is neither image nor text; videos are not supported")
    if not places and count:
        first = next((m for m in parted if m["role"] == "user"), parted[0])
        first["content"] = [*({"type": "image"} for _ in range(count)), *first["content"]]
    elif places != count:
        raise DataError(f"row {row_id} has {count} images, and its prompt has {places} image positions ({IMAGE_MARK})")
    return [{**m, "content": _as_text(m["content"])} for m in parted]


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [dict(part) for part in content]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _as_text(parts: list[dict[str, Any]]) -> Any:
    """Return a string if there are no images: some templates require it for the system prompt."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _with_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return folder / value
    if isinstance(value, Mapping) and value.get("bytes") is None and isinstance(value.get("path"), str):
        return folder / value["path"]
    return value


def _bytes_or_path(value: Any) -> bytes | Path | None:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    return Path(value) if isinstance(value, str | Path) else value if isinstance(value, bytes) else None
