"""A transformers mixer as megatron-core's `self_attention`, with the same tokens and gradients.

megatron-core gives each rank a part of the sequence: a contiguous part (sequence parallelism) of a zigzag part (context
parallelism). The mixer is not sharded, so it receives the tokens of all these ranks, and each rank keeps its own part
of the output (see zigzag.py for the gradients). Modules before and after it, experts and pipeline stages are not
affected.

    [S / (C R), B, D] -> gather R contiguous, C zigzag parts -> [B, S, D] mixer -> slice -> [S / (C R), B, D]

A pack is one row with boundaries, which attention uses. A recurrent mixer gets one row per sequence if its kernels do
not support packed sequences. Tokens are left-aligned, so the padding on the right cannot affect them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fsdptrain.errors import ConfigError, NumericsError
from fsdptrain.megatron.hf_modules import HFModules
from fsdptrain.megatron.zigzag import gather_copies, gather_zigzag, slice_copies, slice_zigzag
from fsdptrain.model.attention.attention import Boundaries

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

_PACKED_KERNELS = ("fla", "causal_conv1d")  # both: for recurrent states, for convolutions


class HFMixer(nn.Module):
    """Wraps `hf`, the transformers module of one layer, and gathers and slices the tokens around it."""

    def __init__(
        self,
        config: "TransformerConfig",
        layer_number: int,
        *,
        modules: HFModules,
        pg_collection: "ProcessGroupCollection",
        cp_comm_type: str | None = None,
    ) -> None:
        """layer_number: counted from 1 over all stages."""
        super().__init__()
        self.mixer = modules.mixers[layer_number - 1]
        self.hf = modules.make_mixer(layer_number - 1, config.params_dtype)
        self.hf.hub_name = self.mixer.hub_name  # type: ignore[assignment]  # table.py reads it
        # A tuple hides it from nn.Module, so that the angles stay in float32 when the model is cast
        makers = [modules.rotary_class] if self.mixer.takes_angles else []
        self._rotary = tuple(make(config=modules.config) for make in makers)
        self._runs = pg_collection.tp if config.sequence_parallel else None
        self._zigzags = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        hidden_states: Tensor,  # [S / (C R), B, D]; B = 1 for a pack
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: "PackedSeqParams | None" = None,
        **_: Any,  # rotary tables and caches; the mixer has its own
    ) -> tuple[Tensor, None]:
        """Return the mixer's output in the shape of its input, and no bias.

        Raises ConfigError for padded rows with context parallelism.
        """
        _require_causal(attention_mask)
        x = hidden_states if self._runs is None else gather_copies(hidden_states, self._runs)
        seqlens = None if packed_seq_params is None else _seqlens(packed_seq_params)
        if self._zigzags is not None:
            if seqlens is None:
                raise ConfigError("--megatron-context-parallel deals packed sequences: padded rows cannot be dealt")
            x = gather_zigzag(x, seqlens, self._zigzags)
        out = self._mix(x.transpose(0, 1), seqlens).transpose(0, 1)
        if self._zigzags is not None:
            assert seqlens is not None, "checked above"
            out = slice_zigzag(out, seqlens, self._zigzags)
        return (out if self._runs is None else slice_copies(out, self._runs)), None

    def _mix(self, x: Tensor, seqlens: Sequence[int] | None) -> Tensor:
        """Apply the mixer: [B, S, D] -> [B, S, D]. seqlens: lengths of the sequences in the row of a pack."""
        if seqlens is None:
            return self._call(x, _Rows.padded(x))
        if sum(seqlens) != x.shape[1] or x.shape[0] != 1:
            raise NumericsError(f"a pack of {sum(seqlens)} tokens came as {tuple(x.shape[:2])} rows and tokens")
        if self.mixer.is_recurrent and not _keeps_packs_apart(x.device):
            rows = pad_sequence(list(x[0].split(list(seqlens))), batch_first=True)
            out = self._call(rows, _Rows.padded(rows))
            return torch.cat([row[:length] for row, length in zip(out, seqlens, strict=True)])[None]
        return self._call(x, _Rows.packed(x, seqlens))

    def _call(self, x: Tensor, rows: "_Rows") -> Tensor:
        told: dict[str, Any] = {"attention_mask": None}
        if self.mixer.takes_angles:
            told["position_embeddings"] = self._rotary[0](x, rows.positions)
        if not self.mixer.is_recurrent:
            told["boundaries"] = rows.boundaries
        if not rows.boundaries.padded:
            cu_seqlens = rows.boundaries.cu_seqlens
            told |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "seq_idx": rows.segments}
            told |= dict.fromkeys(("max_length_q", "max_length_k"), max(rows.boundaries.seqlens))
        found = self.hf(x, **told)
        return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class _Rows:
    """The token metadata that mixers receive in one call."""

    boundaries: Boundaries
    positions: Tensor  # [B, S] i64
    segments: Tensor | None  # [1, T] i32, for a pack

    @classmethod
    def padded(cls, x: Tensor) -> "_Rows":
        batch, length = x.shape[:2]
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
        positions = torch.arange(length, device=x.device).expand(batch, -1)
        return cls(Boundaries((length,) * batch, starts, padded=True), positions, None)

    @classmethod
    def packed(cls, x: Tensor, seqlens: Sequence[int]) -> "_Rows":
        lengths = torch.tensor(seqlens)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        segments = torch.arange(len(seqlens)).repeat_interleave(lengths)
        positions = torch.arange(sum(seqlens)) - cu_seqlens[segments]
        boundaries = Boundaries(tuple(seqlens), cu_seqlens.to(x.device), padded=False)
        return cls(boundaries, positions[None].to(x.device), segments.int()[None].to(x.device))


def _seqlens(packed: "PackedSeqParams") -> tuple[int, ...]:
    """Return the sequence lengths over all ranks, including padding. Reads them from the device once for all layers."""
    known = vars(packed)
    if "seqlens" not in known:
        padded = packed.cu_seqlens_q_padded
        cu_seqlens = packed.cu_seqlens_q if padded is None else padded
        known["seqlens"] = tuple(cu_seqlens.diff().tolist())
    return known["seqlens"]


def _require_causal(mask: Tensor | None) -> None:
    """Raise NumericsError unless the mask is plain causal. In megatron-core's masks, True means masked out."""
    if mask is None:
        return
    known = vars(mask)  # all layers share one mask: check it once
    if "is_causal" not in known:
        known["is_causal"] = torch.equal(mask, torch.ones_like(mask).triu(1))
    if not known["is_causal"]:
        raise NumericsError("a mask that is not plain causal came to a mixer of transformers, which cannot be told")


def _keeps_packs_apart(device: torch.device) -> bool:
    return device.type != "cpu" and all(find_spec(name) is not None for name in _PACKED_KERNELS)
