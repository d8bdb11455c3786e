"""Convert weights with an external bridge, selected by --megatron-bridge.

A bridge loads the files of --hf-checkpoint and names the weights for the rollout engine. Its results are compared
bitwise with the conversion table of fsdptrain before the first step. Checkpoints and exports always use the table,
because no bridge supports float32 masters.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import CheckpointError, NumericsError, describe
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.model import padded_vocab
from fsdptrain.megatron.storage import load_tensors
from fsdptrain.megatron.table import stored_tensors
from fsdptrain.megatron.weights import WeightMap
from fsdptrain.model.loading.files import some_of, stored_dtype
from fsdptrain.model.probes.kernels import Kernel
from fsdptrain.rollout.weight_sync.checksum import bit_checksum

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_TABLE = "the table of fsdptrain"
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)(\d+)")


class Bridge(Protocol):
    def load(self, path: Path) -> None:
        """Load the files of a checkpoint into the model. Collective."""
        ...

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the files, full tensor) for all weights, on every rank. Collective."""
        ...


class MBridge:
    """Adapter for mbridge.

    It maps the names of plain layers to those of Transformer Engine, the only ones that mbridge supports.
    """

    def __init__(self, theirs: Any, model: "GPTModel", config: PreTrainedConfig) -> None:
        self._bridge, self._model, tensor = theirs, model, process_groups().tp.size()
        self._bridge._weight_name_mapping_mcore_local_to_global = engine_names
        self._bridge.make_vocab_size_divisible_by = tensor
        self._bridge.vocab_size = config.vocab_size
        self._bridge.padded_vocab_size = padded_vocab(config.vocab_size, tensor)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        self._bridge.load_weights([self._model], str(path))

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        sent = set()
        for name, tensor in self._bridge.export_weights([self._model]):
            if name not in sent:  # the last stage has its own copy of a tied head
                sent.add(name)
                yield name, tensor


class MegatronBridge:
    """Adapter for megatron-bridge, written against 0.3 to 0.7. Not tested here: it requires Transformer Engine."""

    def __init__(self, theirs: Any, model: "GPTModel") -> None:
        self._bridge, self._model = theirs, model

    @torch.no_grad()
    def load(self, path: Path) -> None:
        self._bridge.load_hf_weights([self._model], str(path))

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._bridge.export_hf_weights([self._model], cpu=False, show_progress=False)


def choose_bridge(
    asked: str, model: "GPTModel", config: PreTrainedConfig, path: Path, dtype: torch.dtype
) -> tuple[Bridge | None, Kernel]:
    """Build the bridge selected by --megatron-bridge, and a line that describes it. Collective.

    Returns None for `auto` and `own`, which use the table. If the bridge is not available, the line is a fallback with
    all reasons: a warning, or an error with --strict.
    """
    if asked in ("auto", "own"):
        return None, Kernel("weights", _TABLE)
    theirs, reasons = None, _against(asked, model, path, dtype)
    if not reasons:
        try:
            theirs = _theirs(asked, config, path, dtype)
        except Exception as error:  # noqa: BLE001  # external code that may break with any version of its dependencies
            reasons = [f"it cannot be built for a {config.model_type}: {describe(error)}"]
    every = list(dict.fromkeys(reason for reasons in gather(reasons) for reason in reasons))
    if every:
        return None, Kernel("weights", _TABLE, asked, "; ".join(every))
    bridge = MBridge(theirs, model, config) if asked == "mbridge" else MegatronBridge(theirs, model)
    return bridge, Kernel("weights", asked)


def _theirs(asked: str, config: PreTrainedConfig, path: Path, dtype: torch.dtype) -> Any:
    """Build the external bridge, not yet attached to the model."""
    if asked == "mbridge":
        with quiet_megatron():
            from mbridge import AutoBridge  # type: ignore[import-not-found]

        return AutoBridge.from_config(copy.deepcopy(config), dtype=dtype)
    with quiet_megatron():
        from megatron.bridge import AutoBridge  # type: ignore[import-not-found]

    return AutoBridge.from_hf_pretrained(str(path))


def load_by_bridge(bridge: Bridge, asked: str, path: Path, weights: WeightMap) -> None:
    """Load the files with the bridge and verify the result against the table. Collective.

    Raises CheckpointError if loading fails. Raises NumericsError if the bridge loads or exports other values than the
    table.
    """
    with raise_on_all_ranks(CheckpointError, f"--megatron-bridge {asked}"):
        load_tensors(path, weights)
    wanted = _checksums(weights.stream())
    try:
        bridge.load(path)
    except Exception as error:  # external code with collectives: if only one rank fails, torchrun stops the others
        raise CheckpointError(f"--megatron-bridge {asked} cannot load {path}: {describe(error)}") from error
    _require_same(wanted, _checksums(weights.stream()), asked, "loads otherwise than the table")
    _require_same(wanted, _checksums(bridge.stream()), asked, "gives back otherwise than the table")


def _checksums(stream: Iterator[tuple[str, Tensor]]) -> dict[str, int]:
    return {name: bit_checksum(tensor) for name, tensor in stream}


def _require_same(wanted: Mapping[str, int], found: Mapping[str, int], asked: str, what: str) -> None:
    """Raise NumericsError on all ranks if any checksum differs. Data-parallel replicas may differ."""
    wrong = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
    with raise_on_all_ranks(NumericsError, f"--megatron-bridge {asked}"):
        if wrong:
            names = some_of(sorted(wrong))
            raise NumericsError(f"--megatron-bridge {asked} {what}: {names}: use --megatron-bridge own")


def _against(asked: str, model: "GPTModel", path: Path, dtype: torch.dtype) -> list[str]:
    """Return the reasons why the bridge cannot be used."""
    package = {"mbridge": "mbridge", "megatron-bridge": "megatron.bridge"}[asked]
    stored = stored_dtype(path)
    reasons = {
        "it is not installed": find_spec(package) is None,
        "layers have modules of transformers, whose names it does not know": any(
            "hub_name" in vars(module) for module in model.modules()
        ),
        f"it rounds what the files hold ({stored or 'config.json does not say'}) to {dtype}, where masters begin": (
            stored is None or torch.promote_types(getattr(torch, stored), dtype) != dtype
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def engine_names(model: "GPTModel", consider_ep: bool = True) -> dict[str, str]:
    """Map the names of this rank's tensors to those of the whole model in Transformer Engine. Called by mbridge.

    consider_ep: number experts over all ranks, else over this rank.
    """
    groups = process_groups()
    per_rank = (model.config.num_moe_experts or 0) // groups.ep.size()
    first = groups.ep.rank() * per_rank if consider_ep else 0
    layers: Any = model.decoder.layers
    found = {}
    for name in stored_tensors(model):
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match is None:
            found[name] = name
            continue
        layer = layers[int(match[1])]
        is_sparse = type(layer.mlp).__name__ == "MoELayer"
        rest = match[2] if model.config.multi_latent_attention else _with_fused_norms(match[2], is_sparse)
        rest = _LOCAL_EXPERT.sub(lambda m: f"mlp.experts.{m[2]}.weight{m[1]}", rest)
        rest = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first}", rest)
        found[name] = f"decoder.layers.{layer.layer_number - 1}.{rest}"
    return found


def _with_fused_norms(rest: str, is_sparse: bool) -> str:
    """Rename the norms of a layer, which Transformer Engine fuses into the following matrices."""
    if rest == "input_layernorm.weight":
        return "self_attention.linear_qkv.layer_norm_weight"
    if rest == "pre_mlp_layernorm.weight" and not is_sparse:
        return "mlp.linear_fc1.layer_norm_weight"
    return rest
