"""Export a model as a Hugging Face folder, written by rank 0."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from fsdptrain.config import Config
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import CheckpointError
from fsdptrain.fsdp.export_folder import publish_folder, temporary_of
from fsdptrain.fsdp.hub_files import FILE_BYTES, write_stream
from fsdptrain.model.loading.files import weight_files
from fsdptrain.model.loading.formats import read_config
from fsdptrain.rollout.stop_tokens import stop_tokens

log = logging.getLogger(__name__)

_COPIED = (  # what a tokenizer or processor reads, and licenses; anything else in the folder may be private
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("*vocab*.json", "*vocab*.txt", "merges.txt", "*.model", "*.tiktoken", "emoji.json"),
    *("*processor_config.json", "generation_config.json", "*.jinja", "chat_template.json", "LICENSE*", "NOTICE*"),
)
_FOLDER = re.compile(  # of `_name_or_path`, and of absolute paths under other keys, which may be names of the Hub
    rb'("_name_or_path": *"|"\w*_(?:path|file|dir)": *"(?=[/~\\]|[A-Za-z]:))(?:[^"\\]|\\.)*(?:\\?/|\\\\)'
)
Stream = Callable[..., Iterator[tuple[str, Tensor]]]  # takes dtype=
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class ExportDtypes:
    """The dtypes of an exported model.

    A tensor that its source stores in another dtype than most, such as a router's bias in float32, keeps that precision
    at least.

    Args:
        source: the checkpoint that the model was loaded from.
        dtype: of all other tensors.
        computed: dtype in which engines and trainer computed.
        prefix: `base_model_prefix` of the model, which the names of the files may lack.
    """

    source: Path
    dtype: torch.dtype
    computed: torch.dtype
    prefix: str
    _lost: list[int] = field(default_factory=lambda: [0, 0])  # elements that rounding sets back, and trained ones

    @cached_property
    def wider(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors, by their names without `prefix`, that keep more precision than `dtype` has."""
        stored, most = _stored_dtypes(self.source)
        wide = {name: torch.promote_types(dtype, self.dtype) for name, dtype in stored.items() if dtype != most}
        return {self._bare(name): dtype for name, dtype in wide.items() if dtype != self.dtype}

    @property
    def rounds(self) -> bool:
        """Whether the model computed with more precision than is exported."""
        return torch.promote_types(self.dtype, self.computed) != self.dtype

    @property
    def streamed(self) -> torch.dtype:
        """Dtype to gather in."""
        kept = self.computed if self.rounds else self.dtype
        return reduce(torch.promote_types, self.wider.values(), kept)

    def cast(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a stream in `streamed` in their own dtypes."""
        counts = self.rounds and dist.get_rank() == 0
        before = {self._bare(name): entry for name, entry in stored_entries(self.source)} if counts else {}
        for name, tensor in stream:
            bare = self._bare(name)
            dtype = self.wider.get(bare, self.dtype) if tensor.is_floating_point() else tensor.dtype
            if bare in before and dtype != tensor.dtype:
                old = before[bare][:].to(tensor)
                trained = tensor != old
                self._lost[0] += int((trained & (tensor.to(dtype) == old.to(dtype))).sum())
                self._lost[1] += int(trained.sum())
            yield name, tensor.to(dtype) if self.streamed != self.dtype else tensor

    def _bare(self, name: str) -> str:
        return name.removeprefix(f"{self.prefix}.")

    def tell(self) -> None:
        """Log the dtype and what rounding to it costs."""
        name, computed = _name(self.dtype), _name(self.computed)
        log.info("the model is exported in %s%s", name, f", {len(self.wider)} tensors in more" if self.wider else "")
        if self.rounds:
            lost, trained = self._lost
            line = (
                "--export-dtype %s rounds what was computed in %s: of %d trained elements %d get their old value back"
            )
            log.warning(
                f"{line}, so evaluations of the run are not of the exported model", name, computed, trained, lost
            )

    def write_config(self, target: Path) -> None:
        """Write the config of `source` with the new dtype, in nested configs too, and without quantization."""
        config = read_config(self.source)
        config.pop("quantization_config", None)
        stored = {_stored_dtypes(self.source)[1], _declared(config)}
        config = self._in_new_dtype(config, stored) | {"dtype": _name(self.dtype)}
        (target / "config.json").write_bytes(_without_folders((json.dumps(config, indent=2) + "\n").encode()))

    def _in_new_dtype(self, config: dict[str, Any], stored: Set[torch.dtype | None]) -> dict[str, Any]:
        """Return `config` with the new dtype where it declares one of `stored`, else one that holds its own."""
        nested: dict[str, Any] = {
            key: self._in_new_dtype(x, stored) for key, x in config.items() if isinstance(x, dict)
        }
        dtype = _declared(config)
        if dtype is not None:
            nested["dtype"] = _name(self.dtype if dtype in stored else torch.promote_types(dtype, self.dtype))
        return {key: x for key, x in config.items() if key != "torch_dtype"} | nested


def _declared(config: dict[str, Any]) -> torch.dtype | None:
    name = config.get("dtype") or config.get("torch_dtype")  # the older name
    return getattr(torch, str(name), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_entries(source: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the slice of each tensor in the files of a checkpoint."""
    for file in weight_files(source):
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118  # no mapping


def _stored_dtypes(source: Path) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """Return the dtypes of the float tensors in the files of a checkpoint, by name, and that of most elements."""
    counts, stored = Counter[torch.dtype](), dict[str, torch.dtype]()
    for name, entry in stored_entries(source):
        if (dtype := _FLOATS.get(entry.get_dtype())) is not None:
            stored[name] = dtype
            counts[dtype] += torch.Size(entry.get_shape()).numel()
    return stored, counts.most_common(1)[0][0]


def export_policy(target: Path, config: Config, source: Path, model: PreTrainedModel, stream: Stream) -> None:
    """Write the weights of `stream` in the dtype of --export-dtype. `model` may be on meta. Collective."""
    with raise_on_all_ranks(CheckpointError, f"--hf-checkpoint {source}"):
        name, computed = config.run.export_dtype, getattr(torch, config.compute_dtype_name)
        dtype = computed if name == "auto" else _stored_dtypes(source)[1] if name == "source" else getattr(torch, name)
    dtypes = ExportDtypes(source, dtype, computed, model.base_model_prefix)
    export_hf(target, dtypes, stream, stop=new_stop_tokens(source, model.config, config))


def export_hf(
    target: Path, dtypes: ExportDtypes, stream: Stream, *, max_file_bytes: int = FILE_BYTES, stop: Sequence[int] = ()
) -> None:
    """Write the weights of `stream(dtype=...)` as a folder like the source of `dtypes`. Collective.

    stop: see `copy_rest`.

    Tokenizer, generation config, custom code and licenses are copied. The complete folder is renamed to `target` and
    replaces an older export. Raises CheckpointError on every rank.
    """
    temporary, failure = temporary_of(target), f"the model cannot be exported to {target}"
    with raise_on_all_ranks(CheckpointError, failure):
        streamed = dtypes.streamed
    write_stream(temporary, dtypes.cast(stream(dtype=streamed)), failure=failure, max_bytes=max_file_bytes)
    with raise_on_all_ranks(CheckpointError, failure):
        if dist.get_rank() == 0:
            dtypes.tell()
            dtypes.write_config(temporary)
            copy_rest(dtypes.source, temporary, stop=stop)
            publish_folder(target)


def new_stop_tokens(checkpoint: Path, config: PreTrainedConfig, run: Config) -> tuple[int, ...]:
    """Return the ids that end the responses of a run if they are not those of its checkpoint, else ()."""
    trust = run.model.trust_remote_code
    ids = stop_tokens(checkpoint, config, trust_remote_code=trust, data=run.data)
    return () if ids == stop_tokens(checkpoint, config, trust_remote_code=trust) else ids


def copy_rest(source: Path, target: Path, *, but: Set[str] = frozenset(), stop: Sequence[int] = ()) -> None:
    """Copy the files of a model that are neither weights nor config (tokenizer, code), except those named in `but`.

    stop: ids for the generation config, in place of its own.
    """
    code = _code(source)
    for path in (*source.iterdir(), *source.glob("additional_chat_templates/*.jinja")):
        if path.is_file() and path.name not in but and (path in code or any(map(path.match, _COPIED))):
            content, copied = path.read_bytes(), target / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            copied.write_bytes(_without_folders(content) if path.suffix == ".json" else content)
    if stop:
        generation = target / "generation_config.json"
        values = json.loads(generation.read_text()) if generation.is_file() else {}
        values |= {"eos_token_id": list(stop), "_from_model_config": False}  # else config.json takes precedence
        generation.write_text(json.dumps(values, indent=2) + "\n")


def _code(source: Path) -> set[Path]:
    """Return the Python files that configs of a checkpoint name, and those that they import."""
    configs = b"".join(path.read_bytes() for path in source.glob("*config.json"))
    named = [path for path in source.glob("*.py") if f'"{path.stem}.'.encode() in configs]  # in `auto_map`
    try:
        return {*named, *(Path(file) for path in named for file in get_relative_import_files(path))}
    except OSError:  # it imports from a folder, or a file that is not there
        return set(source.glob("*.py"))


def _without_folders(content: bytes) -> bytes:
    """Return JSON with only the last part of paths, which are of this machine."""
    return _FOLDER.sub(rb"\1", content)
