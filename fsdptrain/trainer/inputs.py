"""What a run is bound to: its rows, templates, tokenizer, own code and models, as digests in each checkpoint."""

import ast
import dataclasses
import hashlib
import inspect
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.config.eval_sets import UNNAMED
from fsdptrain.config.keys import all_keys
from fsdptrain.data.images import content_of
from fsdptrain.data.rows import Rows
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.model.loading.files import weight_files
from fsdptrain.rewards.build import WeightedSum
from fsdptrain.trainer.data import RunData
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.trainer.samples.environment import Agent, LoadedEnvironment, Mixture
from fsdptrain.types import Prompt

log = logging.getLogger(__name__)

MODEL = "files of --hf-checkpoint"
_ROWS = 1000  # of larger data sets so many rows are read, at equal distances
_SLICES, _SLICE_BYTES = 16, 4096  # of each file of weights
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def bind_inputs(
    config: Config,
    folder: RunFolder,
    checkpoint: Path,
    data: RunData,
    reward: WeightedSum,
    environment: LoadedEnvironment | None,
) -> RunFolder:
    """Return `folder` with the digests of the inputs. Collective.

    Raises CheckpointError on all ranks if an input is not that of the checkpoint to resume from. If --resume names that
    checkpoint, the run goes on, with a warning.
    """
    inputs: dict[str, str] = {}
    with raise_on_all_ranks(CheckpointError, "--resume"):
        if dist.get_rank() == 0:
            if config.run.num_rollout:  # else an evaluation, of other data on purpose
                sets = (data.prompts or data.supervised or {UNNAMED: []}).items()
                held_out = {f"held-out rows of {name}": _digest([*map(held_out_content, own)]) for name, own in sets}
                inputs = {
                    "rows of --prompt-data": digest_rows(data.stream.rows),
                    **{name.removesuffix(f" of {UNNAMED}"): digest for name, digest in held_out.items()},
                    "chat template": _digest(str(data.stream.tokenizer.chat_template)),
                    "tokenizer": _tokenizer(data.stream.tokenizer),
                    "source of --reward": _digest([source_of(component.function) for component in reward.components]),
                    **dict(_models(config)),
                }
                if environment is not None:
                    inputs["source of --environment"] = source_of(environment.environment)
            inputs[MODEL] = digest_model(checkpoint)
            before = (folder.progress or {}).get("inputs", {})
            changed = [name for name, digest in inputs.items() if before.get(name, digest) != digest]
            if changed and config.run.resume not in ("auto", "never"):
                log.warning("resumes with other inputs: %s", ", ".join(changed))
            elif changed:
                since = f"since checkpoint {folder.checkpoint} was written, this has changed: {', '.join(changed)}"
                fix = f"restore it, continue with it by --resume {folder.checkpoint}, or choose another --output-dir"
                raise CheckpointError(f"--resume: {since}; {fix}")
    return dataclasses.replace(folder, inputs=inputs)


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(values)).encode(errors="surrogatepass")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return what JSON can write, equal in each process for equal values, of any value with keys of any types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return sorted(([repr(key), _plain(item)] for key, item in value.items()), key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if values := getattr(value, "tolist", None):  # an array or a tensor, whose text leaves values out
        return [str(getattr(value, "dtype", "")), _plain(values())]
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
    """Digest the file that defines a function or the class of an object, and the user's modules that it imports."""
    if isinstance(function, Mixture):
        return _digest({name: source_of(each.environment) for name, each in function.environments.items()})
    function = function.function if isinstance(function, Agent) else function
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
        paths = {Path(inspect.getfile(defined)), *_files_of(sys.modules[defined.__module__])}
        return _digest(sorted(path.read_text(errors="replace") for path in paths))
    except (TypeError, OSError):  # an object without a file
        return f"{module}:{name}"


def _files_of(module: ModuleType) -> set[Path]:
    """Return the files of the user's own modules among `module` and what it imports, directly or not."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        path = Path(getattr(each, "__file__", None) or "")
        installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STANDARD_LIBRARY)
        if path.suffix == ".py" and not installed and each.__name__.split(".")[0] != "fsdptrain" and path not in found:
            found.add(path)
            waiting += _imports_of(each, path)
    return found


def _imports_of(module: ModuleType, path: Path) -> Iterator[ModuleType]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module.__package__)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (sys.modules[name] for name in names if name in sys.modules)


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """Digest the models in local folders: of the reference, of a teacher, of an adapter."""
    for key in all_keys().values():
        value = key.value(config)
        if isinstance(value, str) and any(os.path.isfile(f"{value}/{kind}config.json") for kind in ("", "adapter_")):
            yield f"files of {key.flag}", digest_model(Path(value))


def digest_model(folder: Path) -> str:
    """Digest the config files and slices of all files of weights: the headers, and some of the values."""
    slices = [path.read_bytes() for path in sorted(folder.glob("*config.json"))]  # of processors and generation too
    for path in sorted(folder.glob("adapter_model.safetensors")) or weight_files(folder):
        size = path.stat().st_size
        slices.append(str(size).encode())
        with path.open("rb") as file:
            for index in range(_SLICES):
                file.seek(index * max(0, size - _SLICE_BYTES) // (_SLICES - 1))
                slices.append(file.read(_SLICE_BYTES))
    return hashlib.sha256(b"\0".join(slices)).hexdigest()[:16]
