"""Shims that let megatron-core 0.16 run on CPUs with gloo, for tests and small models.

megatron-core names CUDA in places where any device would work. Each shim replaces one such name for the whole process.
Shims are installed by one explicit call, never by an import, and are rejected if CUDA is present.
"""

import contextlib
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fsdptrain import platform
from fsdptrain.errors import ConfigError

TESTED = ((0, 16), (0, 17))  # megatron-core versions: minimum (inclusive), maximum (exclusive)


class _HostTorch:
    """The torch module, with factories that create host tensors for device "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))


def _splits_as_arrays(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Replace the copy to the host: the tensors are there, but all-to-all takes arrays of split sizes."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(vars(dispatcher).get(name)):
                setattr(dispatcher, name, vars(dispatcher)[name].numpy())
    return tokens_per_expert


def prepare_megatron() -> None:
    """Prepare to use megatron-core. Call it first.

    Raises ConfigError if megatron-core is missing or not a tested version. Installs the shims on CPUs.
    """
    require_megatron()
    if not platform.has_accelerator():
        install_cpu_shims()


def require_megatron() -> str:
    """Return the version of megatron-core.

    Raises ConfigError if megatron-core or einops is missing, or if the version is not tested.
    """
    remedy = "in the clone, pip install '.[megatron]', or use --backend fsdp"
    try:
        found = version("megatron-core")
        version("einops")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--backend megatron needs megatron-core and einops ({error} is missing): {remedy}"
        ) from error
    low, high = TESTED
    if not low <= tuple(int(part) for part in found.split(".")[:2]) < high:
        raise ConfigError(f"--backend megatron is tested with megatron-core 0.16, got {found}: {remedy}")
    return found


def install_cpu_shims() -> None:
    """Install the shims in this process. Raises ConfigError if CUDA is present."""
    if torch.cuda.device_count():
        raise ConfigError(
            "the CPU shims of --backend megatron are not for a process that sees CUDA devices: hide them with "
            "CUDA_VISIBLE_DEVICES=, or compute on them"
        )
    with quiet_megatron():
        import megatron.core.pipeline_parallel.schedules as schedules
        import megatron.core.tensor_parallel.random as generators
        import megatron.core.transformer.moe.moe_utils as moe_utils
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    shims: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (generators, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (generators, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),  # else it creates one
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits_as_arrays),
        (schedules, "torch", _HostTorch()),
    ]
    if "te_general_gemm" not in vars(moe_utils):  # always read, but defined only if Transformer Engine imports
        shims.append((moe_utils, "te_general_gemm", None))
    for owner, name, shim in shims:
        setattr(owner, name, shim)


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
