"""Gradients of megatron-core: summed over ranks and never divided, in its own buffers, in float32."""

from typing import TYPE_CHECKING, Any

from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.masters import Masters

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def wrap(model: "GPTModel") -> Any:
    """In megatron-core's DistributedDataParallel, which here only sums: the losses hold the global denominator.

    `calculate_per_token_loss` of the config makes its factors 1, for experts too: their gradients are sums over the
    packs of all expert-parallel ranks already, and need only those of the ranks with the same experts.
    """
    with quiet_megatron():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    assert model.config.calculate_per_token_loss, "gradients would be divided by the number of ranks"
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return DistributedDataParallel(model.config, options, model)


def reduce_gradients(wrapped: Any, masters: Masters) -> None:
    """Over all ranks that share a parameter, once for each step; then they are each master's `grad`. Collective."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])
    masters.take_gradients()
