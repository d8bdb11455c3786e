"""Run packs through megatron-core's pipeline and compute logprobs on the last stage.

Rows are padded, [N, S], for megatron-core's plain attention, which does not support sequence boundaries; causal
attention never looks at the padding on the right. With Transformer Engine layers, a pack is one row with boundaries
(THD).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig

from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.model import WRAPPED
from fsdptrain.megatron.transformer_config import family_of, is_whole
from fsdptrain.megatron.whole import LAYOUT, WholeLayers
from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.policy import head_transform
from fsdptrain.model.rows import Layout, PackedRows, PaddedRows, core_rows, zeros_with
from fsdptrain.model.vocab_parallel import vocab_parallel_logprobs
from fsdptrain.types import UNTRUNCATED, LogProbs, PackedBatch, Truncation

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

T = TypeVar("T")


def layout_of(config: PreTrainedConfig, split: MegatronConfig, *, has_engine: bool, dtype: torch.dtype) -> Layout:
    """Choose the layout of packs.

    Packed rows need layers that support boundaries: Transformer Engine attention, whose kernels for packed rows support
    half precision only, or that of transformers. For whole layers of transformers the layout probe has chosen.
    """
    if is_whole(config, split.spec):
        return vars(config).get(LAYOUT, "packed")
    family = family_of(config)
    if not family.gated and (split.spec == WRAPPED or (split.spec is None and family.wrapped)):
        return "packed"
    return "packed" if has_engine and dtype != torch.float32 else "padded"


@dataclass(frozen=True)
class LogprobsHead:
    """Computes the logprobs of labels from hidden states, as `policy_logprobs` does."""

    config: PreTrainedConfig  # of the text
    layout: Layout
    chunk_size: int
    temperature: float = 1.0
    truncation: Truncation = UNTRUNCATED

    def __call__(self, model: nn.ModuleList, hidden: Tensor, batch: PackedBatch, *, with_entropy: bool) -> LogProbs:
        """Compute logprobs. hidden: [N, S, D], identical on tensor-parallel ranks. Collective over these ranks."""
        rows = hidden if self.layout == "packed" else hidden[: len(batch.seqlens), : batch.max_seqlen]
        last: Any = model[-1]
        positions, weight, transform = batch.loss_positions, self._weight(last), head_transform(self.config)
        found = (vocab_parallel_logprobs if isinstance(weight, DTensor) else chunked_logprobs)(
            core_rows(batch, self.layout, "").gather(rows.flatten(0, 1), positions),
            weight,  # type: ignore[arg-type]
            batch.labels.index_select(0, positions),
            bias=last.output_layer.bias,
            softcap=transform.softcap,
            logit_scale=transform.logit_scale,
            temperature=self.temperature,
            truncation=self.truncation,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
        )
        values, entropy = (None if x is None else zeros_with(x, positions, batch.num_tokens) for x in found)
        assert values is not None, "logprobs are always made"
        return LogProbs(values, entropy)

    def _weight(self, model: "GPTModel") -> Tensor:
        """Return the head weight without its padding rows."""
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        assert weight is not None, "this is the last stage"
        group = process_groups().tp
        if group.size() == 1:
            return weight
        left = self.config.vocab_size - group.rank() * len(weight)
        mesh = DeviceMesh.from_group(group, weight.device.type)
        shape = torch.Size((self.config.vocab_size, weight.shape[1]))
        stride = (weight.shape[1], 1)
        rows = weight[: max(0, min(left, len(weight)))]
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def run_packs(
    parts: Iterable[Any],  # of this rank's stage, wrapped or not
    batches: Sequence[PackedBatch],
    finish: Callable[[Tensor, PackedBatch], T],
    *,
    layout: Layout,
    train: bool,
) -> list[T]:
    """Run the forward pass of every pack, and with `train` the backward pass, in megatron-core's schedule. Collective.

    Does not reduce gradients.

    Args:
        finish: maps the hidden states [N, S, D] of the last stage and the pack to the result, or with `train` to (loss
            [], _, result). Called on the last stage only.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    own, packs, count = list(parts), list(batches), len(batches)
    config, stages = get_model_config(own[0]), process_groups().pp.size()
    if len(own) > 1:  # an interleaved schedule needs a pack for each stage, also in its last group
        packs += packs[:1] * (stages - count)
        groups = range(stages, len(packs) + 1)
        config.microbatch_group_size_per_vp_stage = next(n for n in groups if not 0 < len(packs) % n < stages)

    def forward(numbered: Iterator[tuple[int, PackedBatch]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        (number, batch), whole = next(numbered), isinstance(getattr(model, "module", model), WholeLayers)
        hidden = model(batch, layout) if whole else model(**_inputs(batch, config, layout))

        def at_end(hidden: Tensor, non_loss_data: bool = False) -> Any:
            if number < count:
                return finish(hidden, batch)
            return 0 * hidden.sum(), torch.zeros((), dtype=torch.int, device=hidden.device), None  # without a gradient

        return hidden, at_end

    run = get_forward_backward_func()
    return run(
        forward_step_func=forward,
        data_iterator=[enumerate(packs) for _ in own],
        model=own,
        num_microbatches=len(packs),
        seq_length=batches[0].max_seqlen,  # stages exchange the actual shapes
        micro_batch_size=len(batches[0].seqlens),
        forward_only=not train,
        collect_non_loss_data=not train,
    )[:count]


def from_last_stage(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Broadcast `tensors` of the last stage, shaped as `like`, to all stages. Collective over the pipeline."""
    group = process_groups().pp
    if group.size() == 1:
        return list(tensors)
    last = group.size() - 1
    found = [x.contiguous() for x in tensors] if group.rank() == last else [torch.empty_like(x) for x in like]
    for tensor in found:
        dist.broadcast(tensor, group=group, group_src=last)
    return found


def _inputs(batch: PackedBatch, config: "TransformerConfig", layout: Layout) -> dict[str, Any]:
    if layout == "packed":
        return _thd_inputs(batch, multiple=process_groups().tp.size())
    padded = PaddedRows(batch, config.tensor_model_parallel_size)
    rows = padded.scatter(batch.input_ids, fill=0).view(padded.shape)
    width = rows.shape[1]
    return {
        "input_ids": rows,
        "position_ids": torch.arange(width, device=rows.device).expand_as(rows),
        # [1, 1, S, S], True where attention is masked out
        "attention_mask": torch.ones(width, width, dtype=torch.bool, device=rows.device).triu(1)[None, None],
    }


def _thd_inputs(batch: PackedBatch, *, multiple: int) -> dict[str, Any]:
    """Build the inputs of one packed row for Transformer Engine's attention. Requires a GPU; not tested yet.

    multiple: the row length must be a multiple of this, for sequence parallelism. Padding is one extra segment.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    found = PackedRows(batch, multiple).inputs(pad_token_id=None)
    ends, longest = found["cu_seq_lens_q"], found["max_length_q"]
    boundaries = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    tokens = {name: found[name] for name in ("input_ids", "position_ids")}
    return {**tokens, "attention_mask": None, "packed_seq_params": boundaries}
