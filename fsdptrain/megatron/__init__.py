"""Training on megatron-core. The only package that imports megatron, and only when --backend megatron asks for it."""

from importlib.metadata import PackageNotFoundError, version

from fsdptrain.errors import ConfigError

TESTED = ((0, 16), (0, 17))  # megatron-core: from, and below


def require_megatron() -> str:
    """The version of megatron-core. ConfigError where it, or what it needs, is missing, or was not tested."""
    remedy = "pip install 'fsdptrain[megatron]', or use --backend fsdp"
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
