"""What a run is bound to: its rows, templates, tokenizer, rewards and model, as digests in each checkpoint."""

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.data.images import content_of
from fsdptrain.data.rows import Rows
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import weight_files
from fsdptrain.rewards.build import WeightedSum
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.types import Prompt

log = logging.getLogger(__name__)

_ROWS = 1000  # of larger data sets so many rows are read, at equal distances
_SLICES, _SLICE_BYTES = 16, 4096  # of each file of weights


def bind_inputs(folder: RunFolder, checkpoint: Path, data: RunData, reward: WeightedSum, *, named: bool) -> RunFolder:
    """Return `folder` with the digests of the inputs. Collective.

    Raises CheckpointError on all ranks if an input is not that of the checkpoint to resume from. named: --resume names
    that checkpoint, so the run goes on, with a warning.
    """
    inputs: dict[str, str] = {}
    with raise_on_all_ranks(CheckpointError, "--resume"):
        if dist.get_rank() == 0:
            inputs = {
                "rows of --prompt-data": digest_rows(data.stream.rows),
                "held-out rows": _digest([held_out_content(prompt) for prompt in (*data.prompts, *data.supervised)]),
                "chat template": _digest(str(data.stream.tokenizer.chat_template)),
                "tokenizer": _tokenizer(data.stream.tokenizer),
                "source of --reward": _digest([source_of(component.function) for component in reward.components]),
                "files of --hf-checkpoint": _model(checkpoint),
            }
            before = (folder.progress or {}).get("inputs", {})
            changed = [name for name, digest in inputs.items() if before.get(name, digest) != digest]
            if changed and named:
                log.warning("resumes with other inputs: %s", ", ".join(changed))
            elif changed:
                since = f"since checkpoint {folder.checkpoint} was written, this has changed: {', '.join(changed)}"
                fix = f"restore it, go on with it by --resume {folder.checkpoint}, or choose another --output-dir"
                raise CheckpointError(f"--resume: {since}; {fix}")
    return dataclasses.replace(folder, inputs=inputs)


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):  # whose order differs in each process
        return sorted(map(repr, value))
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text  # an address differs in each process


def digest_rows(rows: Rows) -> str:
    """Digest the number of rows and their content, images too; of a large data set that of `_ROWS` rows."""
    count = len(rows)
    chosen = range(count) if count <= _ROWS else [i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)]
    contents = []
    for row in (rows[index] for index in chosen):
        images = [content_of(image, reads_files=True) for image in row.images]
        contents.append(_digest(row.prompt, row.label, row.metadata, *images))
    return _digest(count, contents)


def held_out_content(prompt: Prompt) -> tuple[Any, ...]:
    tensors = prompt.images.inputs.values() if prompt.images is not None else ()
    images = [hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for tensor in tensors]
    return (prompt.source, prompt.label, prompt.metadata, *images)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return _digest(tokenizer.get_vocab() if backend is None else backend.to_str(), tokenizer.special_tokens_map)


def source_of(function: Any) -> str:
    """Digest the file that defines a reward of the user; those of this package are known by their names."""
    if isinstance(function, partial):
        return _digest(source_of(function.func), function.args, function.keywords)
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if module.startswith("fsdptrain."):
        return f"{module}:{name}"
    try:
        defined = inspect.unwrap(function) if inspect.isroutine(function) else type(function)
        if module == "__main__":  # other parts of a script may change
            return _digest(inspect.getsource(defined))
        return _digest(Path(inspect.getfile(defined)).read_text(errors="replace"))
    except (TypeError, OSError):  # an object without a file
        return f"{module}:{name}"


def _model(checkpoint: Path) -> str:
    """Digest config.json and slices of all files of weights: the headers, and some of the values."""
    slices = [(checkpoint / "config.json").read_bytes()]
    for path in weight_files(checkpoint):
        size = path.stat().st_size
        slices.append(str(size).encode())
        with path.open("rb") as file:
            for index in range(_SLICES):
                file.seek(index * max(0, size - _SLICE_BYTES) // (_SLICES - 1))
                slices.append(file.read(_SLICE_BYTES))
    return hashlib.sha256(b"\0".join(slices)).hexdigest()[:16]
