"""`fsdptrain plan`: the memory of a run for several numbers of GPUs."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdptrain.config.checks import check_world_size
from fsdptrain.tools.machine import JSON, MACHINE, resolve_command, with_flag, without

if TYPE_CHECKING:
    from fsdptrain.memory.estimate import Estimate

PLAN = {**MACHINE, "json": JSON}
PLAN_USAGE = """\
The memory of a run, by config.json alone, on --num-gpus and on more GPUs.

Takes any option of a run too, e.g. --max-tokens-per-gpu 4096."""
_FACTORS = (1, 2, 4, 8)  # times --num-gpus


def plan(argv: Sequence[str]) -> int:
    """Run `fsdptrain plan [RUN | MODEL] --num-gpus N --gpu-memory-gib G [--json] [run flags]`."""
    resolved = resolve_command("plan", PLAN_USAGE, argv, PLAN)
    if resolved is None:
        return 0
    config, machine = resolved.config, {key: resolved.command_values[key] for key in MACHINE}
    check_world_size(config, machine["num_gpus"])
    from fsdptrain.memory.advice import flags_that_help  # lazy: imports torch
    from fsdptrain.memory.estimate import GIB, Machine, estimate
    from fsdptrain.tools.inspect.inspection import meta_model

    model, _ = meta_model(config)
    host = machine["host_memory_gib"]
    device, host = int((machine["gpu_memory_gib"] or 80) * GIB), None if host is None else int(host * GIB)
    estimates = [estimate(model, config, Machine(i * machine["num_gpus"], device, host)) for i in _FACTORS]
    command = shlex.join(["fsdptrain", *without(with_flag(argv), PLAN)])
    advice = flags_that_help(model, config, estimates[0].machine) if estimates[0].lacks else []
    if resolved.command_values["json"]:
        found = [{**asdict(x), **x.needs, "fits": not x.lacks} for x in estimates]
        sys.stdout.write(json.dumps({"command": command, "flags": advice, "estimates": found}, indent=2) + "\n")
    else:
        _print_table(estimates)
        verdict = "does not fit" if estimates[0].lacks else "fits"
        ways = f"; flags that help, each alone: {', '.join(advice)}" if advice else ""
        is_adapter = config.value("lora_rank") and config.value("lora_export") == "adapter"
        dtype = {"auto": config.compute_dtype_name, "source": "the dtype of --hf-checkpoint"}
        what = f"in {dtype.get(config.run.export_dtype, config.run.export_dtype)}"
        what = "an adapter in float32" if is_adapter else what
        exports = f"; exports {what}" if config.run.export else ""
        assumed = "" if machine["gpu_memory_gib"] else " (assumed: set --gpu-memory-gib)"
        sys.stdout.write(f"\n{verdict}: {estimates[0].line}{assumed}{exports}{ways}\n  {command}\n")
    return 1 if estimates[0].lacks else 0


def _print_table(estimates: "Sequence[Estimate]") -> None:
    """Print one column per number of GPUs."""
    from fsdptrain.memory.estimate import Parts, gib, with_margin
    from fsdptrain.tools.inspect.text import narrow_console, section, table

    def rows(parts: "Sequence[Parts]", total: str) -> list[tuple[str, ...]]:
        names = dict.fromkeys(name for part in parts for name in part)
        found = [(name, *(gib(part.get(name, 0)) for part in parts)) for name in names]
        return [*found, (total, *(gib(with_margin(part)) for part in parts))] if found else []

    console, numbers = narrow_console(), [str(x.machine.num_ranks) for x in estimates]
    for title, parts in (
        ("Training, GiB per GPU", [x.training for x in estimates]),
        ("Generation, GiB per GPU", [x.generation for x in estimates]),
        ("Host, GiB per node", [x.on_host for x in estimates]),
    ):
        if any(parts):
            section(console, title, table(("GPUs",), numbers, rows(parts, "together, with 5 % margin")))
