"""Warm-up and decay of the learning rate."""

import math
from collections.abc import Callable

from fsdptrain.config import OptimConfig

# Fraction of (lr - min_lr) left when a fraction `x` in [0, 1] of the decay is done.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


def lr_schedule(config: OptimConfig, *, total_steps: int) -> Callable[[int], float]:
    """Return a function from the number of completed updates to the learning rate of the next update.

    With w warm-up and d decay updates (d is --lr-decay-iters, else `total_steps`), update k, counted from 0, uses:

      k <= w, w > 0   lr k/w, so that update 0 runs at 0
      constant        lr
      k > d           min_lr
      else            min_lr + c (lr - min_lr), where c is, with x = (k - w) / (d - w), linear 1 - x; cosine
                      (1 + cos(pi x)) / 2

    These are the definitions of Megatron-LM and slime. `config` must be validated.
    """
    decay_steps = config.lr_decay_iters or max(total_steps, 1)
    warmup_steps = config.lr_warmup_iters
    peak, floor = config.lr, config.min_lr

    def schedule(num_updates: int) -> float:
        if warmup_steps > 0 and num_updates <= warmup_steps:
            return peak * num_updates / warmup_steps
        if config.lr_decay_style == "constant":
            return peak
        if num_updates > decay_steps:
            return floor
        done = max(0.0, (num_updates - warmup_steps) / max(decay_steps - warmup_steps, 1))
        return floor + (peak - floor) * DECAYS[config.lr_decay_style](done)

    return schedule
