"""`fsdptrain plan`: whether a run fits into memory."""

import shlex
import sys
from collections.abc import Sequence

from fsdptrain.config.checks import check_world_size
from fsdptrain.config.flags import resolve, without
from fsdptrain.errors import ConfigError
from fsdptrain.help_text import asks_for_help, print_options
from fsdptrain.tools.machine import HF_CHECKPOINT, JSON, MACHINE, check_machine, print_json, quiet_transformers

PLAN = {**MACHINE, "json": JSON}
PLAN_USAGE = """\
The memory of a run, by config.json alone, and which flags make it fit.

Takes any option of a run too, e.g. --max-tokens-per-gpu 4096."""


def plan(argv: Sequence[str]) -> int:
    """Run `fsdptrain plan --hf-checkpoint X --num-gpus N --gpu-memory-gib G [--json] [run flags]`."""
    if asks_for_help(argv):
        return print_options("fsdptrain plan", PLAN_USAGE, {"hf_checkpoint": HF_CHECKPOINT, **PLAN})
    resolved = resolve(argv, PLAN)
    machine = {key: resolved.own[key] for key in MACHINE}
    check_machine(machine)
    if resolved.config.model.backend == "megatron":
        raise ConfigError("fsdptrain plan supports --backend fsdp only")
    check_world_size(resolved.config, machine["num_gpus"])
    quiet_transformers()
    from fsdptrain.tools.inspect.inspection import meta_model
    from fsdptrain.tools.plan import text as plan_text  # lazy: imports torch
    from fsdptrain.tools.plan.plan import Machine, make_plan

    model, _ = meta_model(resolved.config, with_adapters=True)
    found = make_plan(model, resolved.config, Machine.of_gib(**machine))
    command = shlex.join(["fsdptrain", *without(argv, PLAN)])
    if resolved.own["json"]:
        print_json({**plan_text.as_mapping(found, command), "speed": resolved.config.speed_line})
    else:
        plan_text.print_plan(found, command)
        sys.stdout.write(resolved.config.speed_line and f"{resolved.config.speed_line}\n")
    return 0 if found.fits else 1
