"""`fsdptrain inspect`: what would run."""

import json
import sys
from collections.abc import Sequence

from fsdptrain.errors import NumericsError
from fsdptrain.tools.machine import JSON, NUM_GPUS, resolve_command

USAGE = """\
What will run, by config.json alone: parameters, layout, kernels.

Takes any option of a run too; with --strict a fallback ends in exit code 2."""


def inspect(argv: Sequence[str]) -> int:
    """Run `fsdptrain inspect [RUN | MODEL] [--num-gpus N] [--json] [run flags]`."""
    resolved = resolve_command("inspect", USAGE, argv, {"num_gpus": NUM_GPUS, "json": JSON})
    if resolved is None:
        return 0
    from fsdptrain.model.probes.kernels import require_no_fallback  # lazy: imports torch
    from fsdptrain.tools.inspect.inspection import inspect_model
    from fsdptrain.tools.inspect.text import print_inspection

    found = inspect_model(resolved.config, num_gpus=resolved.command_values["num_gpus"])
    if resolved.command_values["json"]:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        print_inspection(found)
    if found.refusal:
        raise NumericsError(found.refusal)
    if resolved.config.model.strict:
        require_no_fallback(found.kernels)
    return 0
