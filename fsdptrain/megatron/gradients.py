"""Gradient reduction of megatron-core: sums over ranks, never averages, in its own float32 buffers."""

from typing import TYPE_CHECKING, Any

from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.masters import Masters

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def wrap(model: "GPTModel") -> Any:
    """Wrap the model in megatron-core's DistributedDataParallel, which only sums: losses hold the global denominator.

    `calculate_per_token_loss` sets its scaling factors to 1, for experts too. Expert gradients are already sums over
    the packs of all expert-parallel ranks and need only the sum over the ranks with the same experts.
    """
    with quiet_megatron():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    assert model.config.calculate_per_token_loss, "gradients would be divided by the number of ranks"
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return DistributedDataParallel(model.config, options, model)


def reduce_gradients(wrapped: Any, masters: Masters) -> None:
    """Reduce gradients over all ranks that share a parameter, and set the masters' `grad`. Collective.

    Call it once per step.
    """
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])
    masters.take_gradients()
