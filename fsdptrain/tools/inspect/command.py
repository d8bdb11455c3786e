"""`fsdptrain inspect`: what would run."""

from collections.abc import Sequence

from fsdptrain.config.flags import asks_for_help, resolve
from fsdptrain.errors import ConfigError
from fsdptrain.tools.arguments import with_flag
from fsdptrain.tools.machine import HF_CHECKPOINT, JSON, NUM_GPUS, check_machine, print_json, quiet_transformers

INSPECT = {"num_gpus": NUM_GPUS, "json": JSON}
INSPECT_USAGE = """\
What will run, by config.json alone: layers, layout, kernels.

Takes any option of a run too; with --strict a fallback ends in exit code 2."""


def inspect(argv: Sequence[str]) -> int:
    """Run `fsdptrain inspect [RUN | MODEL] [--num-gpus N] [--json] [run flags]`."""
    if asks_for_help(argv):
        from fsdptrain.help_text import print_options

        return print_options(
            "fsdptrain inspect [RUN | MODEL]", INSPECT_USAGE, {"hf_checkpoint": HF_CHECKPOINT, **INSPECT}
        )
    argv = with_flag(argv)
    resolved = resolve(argv, INSPECT)
    check_machine({"num_gpus": resolved.command_values["num_gpus"]})
    quiet_transformers()
    if resolved.config.model.backend == "megatron":
        raise ConfigError(
            "fsdptrain inspect supports --backend fsdp only: a run with --backend megatron checks its build"
        )
    from fsdptrain.tools.inspect import inspection  # lazy: imports torch
    from fsdptrain.tools.inspect.text import print_inspection

    found = inspection.inspect_model(resolved.config, num_gpus=resolved.command_values["num_gpus"])
    if resolved.command_values["json"]:
        print_json(found.as_dict())
    else:
        print_inspection(found)
    inspection.raise_problems(found, strict=resolved.config.model.strict)
    return 0
