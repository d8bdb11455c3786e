"""The forward pass of the policy: from a pack to the logprobs of its labels, inside the root module's forward.

FSDP2 gathers the weight of the head only inside the root's forward, so the logprobs are computed there. The stock head
stays available for `check_head`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.algo.weights import count_totals
from fsdptrain.data.packing.pack import pack
from fsdptrain.distributed import gather, one_line
from fsdptrain.enabled_features import NO_FEATURES, Features
from fsdptrain.errors import NumericsError
from fsdptrain.model.attention.attention import PACKAGE_ATTENTION
from fsdptrain.model.attention.masks import SkipMaskCreation
from fsdptrain.model.logit_passes import HeadTransform
from fsdptrain.model.logprobs import chunked_logprobs
from fsdptrain.model.rows import Layout, core_rows
from fsdptrain.model.structure import base_model, lm_head, reshard
from fsdptrain.types import UNTRUNCATED, Images, LogProbs, PackedBatch, Sample, Truncation

if TYPE_CHECKING:
    from fsdptrain.feature import Rows
    from fsdptrain.protocols import ForwardRole

# Largest mean difference between the logprobs of two exact implementations. In half precision this is the rounding
# error of logits of magnitude 30. A leak between sequences or a missing scale changes logprobs by far more.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}

_BUGS = (TypeError, AttributeError, LookupError, AssertionError)  # of this package, if its code raises them
# Errors that a model may raise when it is called in a way that it was not written for.
MODEL_ERRORS = (*_BUGS, RuntimeError, ValueError, ImportError, NumericsError)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

# Config keys for scales applied to the logits. `check_head` verifies them at startup.
_SCALE_KEYS: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda x: x,  # cohere
    "lm_head_multiplier": lambda x: x,  # falcon_h1
    "logits_scaling": lambda x: 1.0 / x,  # granite
    "logits_mup_width_multiplier": lambda x: 1.0 / x,  # inkling
}
_MULTIPLIES_BY_LOGITS_SCALING = {"hyperclovax"}
_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # gemma, recurrent_gemma, xlstm


def install_policy_forward(model: PreTrainedModel, *, chunk_size: int, features: Features = NO_FEATURES) -> None:
    """Replace `model.forward` with one that takes a PackedBatch.

    Call it before sharding; `policy_logprobs` runs it. chunk_size: number of tokens whose logits exist at a time.
    """
    model.forward = capture_model_errors(PolicyForward(model, chunk_size=chunk_size, features=features))


class PolicyForward:
    """The forward of a policy. Returns a dict of tensors, in which FSDP2 finds the tensors for its backward hooks."""

    def __init__(self, model: PreTrainedModel, *, chunk_size: int, features: Features) -> None:
        self._model = model
        self._stock_forward = model.forward
        self._features = features
        self._head_transform = head_transform(model.config)
        self._pad_token_id = model.config.get_text_config().to_dict().get("pad_token_id")  # some configs lack the key
        self._skip_mask_creation = SkipMaskCreation(PACKAGE_ATTENTION)
        logprobs = features.chained(lambda feature, stock: feature.logprobs_function(stock), chunked_logprobs)
        self._logprobs = partial(logprobs, chunk_size=chunk_size)

    def __call__(
        self,
        batch: PackedBatch,
        *,
        layout: Layout,
        temperature: float = 1.0,
        truncation: Truncation = UNTRUNCATED,
        role: "ForwardRole" = "train",
        with_entropy: bool = False,
        stock_head: bool = False,
    ) -> dict[str, Tensor]:
        features, attention = self._features, str(self._model.config._attn_implementation)
        rows = features.first(lambda feature: feature.rows(batch, layout, attention))
        rows = rows or core_rows(batch, layout, attention)
        inputs = rows.inputs(pad_token_id=self._pad_token_id)
        with features.entered(lambda feature: feature.forward(batch, rows, role, inputs)):
            if stock_head:
                logits = rows.gather(self._stock_forward(**inputs).logits.flatten(0, 1), rows.loss_positions)
                values = _stock_logprobs(logits, batch.labels[rows.loss_positions])
                return {"values": rows.to_pack(values, rows.loss_positions)}
            with self._skip_mask_creation((attention, layout, *inputs)):
                output = base_model(self._model)(**inputs)
            extras = features.merged(lambda feature: feature.outputs(batch, rows, output))
            return extras | self._head(batch, rows, output, temperature, truncation, with_entropy=with_entropy)

    def _head(
        self,
        batch: PackedBatch,
        rows: "Rows",
        output: Any,
        temperature: float,
        truncation: Truncation,
        *,
        with_entropy: bool,
    ) -> dict[str, Tensor]:
        """Return the logprobs of the labels [T], and the entropy, from the `output` of the base model."""
        positions = rows.loss_positions
        head = dict(lm_head(self._model).named_parameters(recurse=False))
        values, entropy = self._logprobs(
            rows.gather(output.last_hidden_state.flatten(0, 1), positions),
            weight=head["weight"],
            bias=head.get("bias"),
            labels=batch.labels.index_select(0, positions),
            temperature=temperature,
            softcap=self._head_transform.softcap,
            logit_scale=self._head_transform.logit_scale,
            truncation=truncation,
            with_entropy=with_entropy,
        )
        found = {"values": rows.to_pack(values, positions)}
        if entropy is not None:
            found["entropy"] = rows.to_pack(entropy, positions)
        return found


def capture_model_errors(forward: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Wrap `forward` to append an error of the model to `refusals`, if the caller passes that list.

    A bug of this package is raised: it must not select another layout.
    """

    def capturing(batch: PackedBatch, *, refusals: list[Exception] | None = None, **options: Any) -> dict[str, Tensor]:
        try:
            return forward(batch, **options)
        except MODEL_ERRORS as error:
            # OOM says nothing about the model
            if refusals is None or isinstance(error, torch.OutOfMemoryError) or _is_own_bug(error):
                raise
            refusals.append(error)  # caught inside the root's forward, which keeps FSDP2's state consistent
            return {"values": torch.zeros(batch.num_tokens, device=batch.input_ids.device)}

    return capturing


def _is_own_bug(error: Exception) -> bool:
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, _BUGS) and frames[-1].startswith(_PACKAGE)


def policy_logprobs(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    layout: Layout,
    temperature: float = 1.0,
    truncation: Truncation = UNTRUNCATED,
    role: "ForwardRole" = "train",
    with_entropy: bool = False,
) -> LogProbs:
    """Compute the logprobs of the labels of `batch`, which is on the device. Collective if the model is sharded.

    The head runs only at `batch.loss_positions`. Elsewhere values and entropy are 0, without gradient. Temperature and
    truncation are those that the labels were sampled with.
    """
    options = {"temperature": temperature, "truncation": truncation, "role": role, "with_entropy": with_entropy}
    found = model(batch, layout=layout, **options)
    return LogProbs(values=found.pop("values"), entropy=found.pop("entropy", None), extras=found)


def logprobs_or_refusal(model: PreTrainedModel, batch: PackedBatch, layout: Layout) -> tuple[Tensor, str]:
    """Return the logprobs [T], and the error message of the first rank that failed or "". Collective."""
    refusals: list[Exception] = []
    values = model(batch, layout=layout, refusals=refusals)["values"]
    said = next((words for words in gather(one_line(refusals[0]) if refusals else None) if words), "")
    reshard(model)
    return values, said


def head_transform(config: PreTrainedConfig) -> HeadTransform:
    """Read from the config how the model transforms its logits."""
    text = config.get_text_config()
    scale = 1.0
    for key, factor in _SCALE_KEYS.items():
        value = getattr(text, key, None)  # minicpm3 computes it as a property
        if value is not None:
            scale *= value if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING else factor(value)
    values = text.to_dict()
    softcap = next((values[key] for key in _SOFTCAP_KEYS if values.get(key) is not None), None)
    return HeadTransform(logit_scale=scale, softcap=softcap)


def plain_batch(segments: list[list[int]], *, device: torch.device, images: Images | None = None) -> PackedBatch:
    """Build a pack of whole token lists with a loss on every next token, for checks without samples or weights."""
    samples = [Sample("", ids, [False] + [True] * (len(ids) - 1), [0.0] * len(ids)) for ids in segments]
    totals = count_totals([len(ids) - 1 for ids in segments])
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=1)
    return replace(batch, loss_weights=batch.loss_mask.float(), images=images).to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode within the context and restore its mode on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def over_ranks(value: float) -> float:
    """Return the maximum of `value` over ranks, or nan if any rank has nan. Collective."""
    values = gather(value)
    return next((x for x in values if x != x), max(values))


def _stock_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute logprobs [M] from the logits [M, V] of a stock model. For few tokens: the logits exist as a whole."""
    return logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
