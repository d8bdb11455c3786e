"""Shims that let megatron-core 0.16 run on CPUs with gloo, for tests and small models.

megatron-core names CUDA in places where any device would work. Each shim replaces one such name for the whole process.
Shims are installed by one explicit call, never by an import, and are rejected if CUDA is present. The build report
lists them, together with the names replaced because Transformer Engine is missing.
"""

import contextlib
import warnings
from typing import Any

import torch

from fsdptrain import platform
from fsdptrain.errors import ConfigError
from fsdptrain.megatron import require_megatron

_replaced: dict[str, None] = {}  # insertion-ordered; global, because replacements are global to the process


class _Stream:
    """A stream that does nothing: CPU work is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> "_Stream":
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


class _HostTorch:
    """The torch module, with factories that create host tensors for device "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))


def prepare_megatron() -> None:
    """Prepare to use megatron-core. Call it first.

    Raises ConfigError if megatron-core is missing or not a tested version. Installs the shims on CPUs.
    """
    require_megatron()
    if not platform.has_accelerator():
        install_cpu_shims()


def install_cpu_shims() -> None:
    """Install the shims once per process. Raises ConfigError if CUDA is present."""
    if torch.cuda.device_count():
        raise ConfigError(
            "the CPU shims of --backend megatron are not for a process that sees CUDA devices: hide them with "
            "CUDA_VISIBLE_DEVICES=, or compute on them"
        )
    if "torch.cuda.Stream" in _replaced:
        return
    with quiet_megatron():
        import megatron.core.pipeline_parallel.schedules as schedules
        import megatron.core.tensor_parallel.random as generators
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as dispatcher

    stream = _Stream()
    to_host = dispatcher.maybe_move_tensor_to_cpu

    def as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:  # the original ignores as_numpy on the host
            return tensor.numpy()
        return to_host(tensor, as_numpy, record_stream)

    replace_name(torch.cuda, "current_device", lambda: torch.device("cpu"))
    replace_name(torch.cuda, "Stream", _Stream)
    replace_name(torch.cuda, "current_stream", lambda *_: stream)
    replace_name(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    replace_name(torch.cuda, "synchronize", lambda *_: None)
    replace_name(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    replace_name(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    replace_name(torch.cuda, "manual_seed", torch.manual_seed)
    replace_name(generators, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    replace_name(generators, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    replace_name(dispatcher, "maybe_move_tensor_to_cpu", as_list)
    replace_name(schedules, "torch", _HostTorch())
    if "te_general_gemm" not in vars(moe_utils):  # always read, but defined only if Transformer Engine imports
        replace_name(moe_utils, "te_general_gemm", None)


def replace_name(module: Any, name: str, value: object) -> None:
    """Replace a name for the whole process and record it."""
    setattr(module, name, value)
    owner = module.__name__ if module is not torch.Tensor else "torch.Tensor"
    _replaced[f"{owner}.{name}"] = None


def replaced() -> list[str]:
    """Return the names in megatron-core and torch that this process has replaced."""
    return list(_replaced)


def ignore_older_names() -> None:
    """Ignore warnings about deprecated collectives: megatron-core 0.16 uses names that torch 2.13 deprecates."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


@contextlib.contextmanager
def quiet_megatron():
    """Silence megatron-core's warnings about missing optional packages on import and model construction.

    The build report lists what is used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
