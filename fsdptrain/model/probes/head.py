"""Checks of the chunked head and of the backward pass on a few random tokens, before the first step."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import one_line
from fsdptrain.errors import NumericsError
from fsdptrain.model.policy import MODEL_ERRORS, TOLERANCES, evaluating, over_ranks, plain_batch, policy_logprobs
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import reshard, stock_class
from fsdptrain.types import PackedBatch


@torch.no_grad()
def check_head(
    model: PreTrainedModel,
    *,
    vocab_size: int,
    layout: Layout,
    compute_dtype: torch.dtype,
    device: torch.device | None = None,
) -> float:
    """Compare the chunked logprobs with those of the stock model on a few random tokens. Collective.

    Returns the mean difference, the largest over ranks. Raises NumericsError on every rank if it exceeds the tolerance
    of `compute_dtype`: the model then transforms its logits in a way that `head_transform` does not know.
    """
    batch = _random_pack(vocab_size, device)
    with evaluating(model):
        ours = policy_logprobs(model, batch, layout=layout).values
        stock = model(batch, layout=layout, stock_head=True)["values"]
    reshard(model)
    difference = over_ranks((ours - stock).abs().sum().item() / (batch.num_tokens - 1))
    tolerance = TOLERANCES[compute_dtype]
    if not difference <= tolerance:
        raise NumericsError(
            f"the logprobs of {stock_class(model).__name__} differ by {difference:.2g} from its unmodified head's "
            f"(tolerance {tolerance:g}, {compute_dtype}): it changes its logits in an unknown way; add the key of "
            "its config to fsdptrain/model/policy.py, or choose another --hf-checkpoint"
        )
    return difference


def check_backward(
    model: PreTrainedModel,
    *,
    vocab_size: int,
    layout: Layout,
    device: torch.device | None = None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run one backward pass over a few random tokens. Collective.

    `look` is called while the gradients exist; they are dropped afterwards. Raises NumericsError on every rank, before
    the first step, for a model that supports scoring but not training (reformer; a kernel without a backward).
    """
    batch = _random_pack(vocab_size, device)
    try:
        with evaluating(model):
            policy_logprobs(model, batch, layout=layout).values.sum().backward()
    except MODEL_ERRORS as error:  # raised by the model's own code, which is the same on every rank
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise NumericsError(f"{stock_class(model).__name__} cannot be trained: {one_line(error)}") from error
    reshard(model)
    look()
    for parameter in model.parameters():
        parameter.grad = None


def _random_pack(vocab_size: int, device: torch.device | None) -> PackedBatch:
    tokens = torch.randint(vocab_size, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    return plain_batch([tokens], device=device or platform.local_device())
