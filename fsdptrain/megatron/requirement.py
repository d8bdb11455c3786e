"""The versions of megatron-core that the backend is tested with."""

from importlib.metadata import PackageNotFoundError, version

from fsdptrain.errors import ConfigError

TESTED = ((0, 16), (0, 17))  # megatron-core versions: minimum (inclusive), maximum (exclusive)


def require_megatron() -> str:
    """Return the version of megatron-core.

    Raises ConfigError if megatron-core or einops is missing, or if the version is not tested.
    """
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
