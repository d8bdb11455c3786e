"""Pictures in rows of data, and where they stand in a chat.

A column holds one picture or a list: the path of a file (beside the data, if it is not absolute), its bytes, the
mapping of both that parquet files hold, or a picture that `datasets` has opened already.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.errors import DataError
from fsdptrain.types import Message

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"  # in a prompt: here stands the next picture


def as_pictures(value: Any, folder: Path) -> tuple[Any, ...]:
    """The pictures of a cell, not opened; paths become whole ones."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_with_folder(one, folder) for one in values)


def open_picture(value: Any, *, row_id: str, column: str) -> "Image":
    """In RGB. DataError for what is none."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Image.Image):
        return value.convert("RGB")
    source = _bytes_or_path(value)
    if source is None:
        raise DataError(
            f"--image-key {column}: row {row_id} holds a {type(value).__name__}; a picture is the path of a file, its "
            "bytes, or what datasets makes of them"
        )
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"--image-key {column}: a picture of row {row_id} cannot be read: {error}") from error


def content_of(value: Any) -> str:
    """Equal for the same picture in the same form; a file is known by its path."""
    source = _bytes_or_path(value)
    if isinstance(source, Path):
        return str(source)
    return hashlib.sha256(value.tobytes() if source is None else source).hexdigest()


def with_places(messages: Sequence[Message], count: int, *, row_id: str) -> list[Message]:
    """`messages` whose content says where each of `count` pictures stands, as chat templates want it.

    That is where the text says `<image>`; without any, before the words of the first message of the user. Content that
    is a list of parts stays as it is. DataError where there are more or fewer places than pictures, or a video.
    """
    parted = [{**m, "content": _parts(m["content"])} for m in messages]
    places = sum(part.get("type") == "image" for m in parted for part in m["content"])
    if any(part.get("type") not in ("image", "text") for m in parted for part in m["content"]):
        raise DataError(f"row {row_id}: a message has a part that is neither image nor text; videos are not supported")
    if not places and count:
        first = next((m for m in parted if m["role"] == "user"), parted[0])
        first["content"] = [*({"type": "image"} for _ in range(count)), *first["content"]]
    elif places != count:
        raise DataError(f"row {row_id} has {count} pictures, and its prompt has {places} places for them ({MARK})")
    return [{**m, "content": _text_alone(m["content"])} for m in parted]


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [dict(part) for part in content]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _text_alone(parts: list[dict[str, Any]]) -> Any:
    """A text, where there is no picture: some templates want the system prompt so."""
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
