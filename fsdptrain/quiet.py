"""Warnings of other libraries that no user can act on."""

import logging

# transformers imports torchao, and peft bitsandbytes, wherever they are installed; each warns of kernels that it lacks
_NOISY = ("torchao", "bitsandbytes", "torch.utils._pytree")


def silence_libraries() -> None:
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
