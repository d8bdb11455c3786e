"""Command line interface: train, inspect, plan, export, eval and report.

`fsdptrain [flags]` trains. `fsdptrain inspect` shows what would run. `fsdptrain plan` checks whether it fits into
memory. `fsdptrain export` writes a checkpoint as a Hugging Face directory. `fsdptrain eval` scores a model.
`fsdptrain report` summarizes a run; `fsdptrain watch` shows it in the browser while it goes on.

Errors that a user can fix print one line to stderr and exit with code 2. Ctrl-C exits silently with code 130.
"""

import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsdptrain import __version__
from fsdptrain.config import Config
from fsdptrain.config.checks import check_world_size
from fsdptrain.config.flags import Option, Resolved, config_options, parse, resolve, without
from fsdptrain.config.grid import across_nodes, draw_grid
from fsdptrain.config.keys import all_keys
from fsdptrain.config.recipe import to_yaml
from fsdptrain.config.rules import ExportChoice
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.launch.failures import failure_of, report_failure
from fsdptrain.quiet import silence_libraries
from fsdptrain.rank_variables import read_rank_variables

DESCRIPTION = """\
Reinforcement learning on any Hugging Face model, with PyTorch's own FSDP2.

Train, inspect, plan, report, eval, export:
  fsdptrain --hf-checkpoint Qwen/Qwen3-4B --fsdp-cpu-offload
  fsdptrain --recipe recipes/sft_qwen2.5_7b.yaml --lr 1e-5 --dry-run
  fsdptrain inspect --hf-checkpoint Qwen/Qwen3-4B
  fsdptrain plan --hf-checkpoint Qwen/Qwen3-4B --num-gpus 8 --gpu-memory-gib 80
  fsdptrain report runs/Qwen3-4B-grpo
  fsdptrain watch runs/Qwen3-4B-grpo
  fsdptrain eval --checkpoint Qwen/Qwen3-4B --prompt-data questions.jsonl
  fsdptrain export --checkpoint runs/Qwen3-4B-grpo/checkpoints/step_00000050 \\
                   --output my-model

Precedence: flag > recipe > preset > default. --dry-run shows each source."""

_BEFORE_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # suppress C++ stack traces; errors are reported in one line

HF_CHECKPOINT = Option("--hf-checkpoint", str | None, "Hub id, or a folder: its config.json is enough.", None)
EXPORT_EXAMPLE = "--checkpoint runs/Qwen3-4B-grpo/checkpoints/step_00000050 --output my-model"
EXPORT = {
    "checkpoint": Option(
        "--checkpoint", str | None, "Training checkpoint, e.g. runs/Qwen3-4B-grpo/checkpoints/step_00000050.", None
    ),
    "output": Option("--output", str | None, "Folder to write, which from_pretrained reads.", None),
}
NUM_GPUS = Option("--num-gpus", int, "Processes over which the model is sharded. [GPUs]", 1)
JSON = Option("--json", bool, "Print JSON in place of tables.", False)
INSPECT = {
    "num_gpus": NUM_GPUS,
    "json": JSON,
    "against_checkpoint": Option(
        "--against-checkpoint", bool, "Compare names and shapes with the checkpoint's files.", False
    ),
}
INSPECT_USAGE = """\
What will run, by config.json alone: modules, layout, kernels, dtypes.

Takes any option of a run too; with --strict a fallback ends in exit code 2."""
PLAN = {
    "num_gpus": NUM_GPUS,
    "gpu_memory_gib": Option("--gpu-memory-gib", float, "Memory of one GPU. [GiB]", 80.0),
    "host_memory_gib": Option("--host-memory-gib", float | None, "Memory of one host of up to 8 GPUs. [GiB]", None),
    "json": JSON,
}
PLAN_USAGE = """\
The memory of a run, by config.json alone, and which flags make it fit.

Takes any option of a run too, e.g. --max-tokens-per-gpu 4096."""
REPORT = {"rollouts": Option("--rollouts", str | None, "Rollouts to draw in the timeline, e.g. 10:13.", None)}
REPORT_USAGE = """\
usage: fsdptrain report RUN_DIR [--rollouts FIRST:LAST]
       fsdptrain report RUN_DIR [RUN_DIR ...] --html [FILE]

Print the first, the best and the last reward, held-out accuracy, length, share of
groups kept, pass rate and (without a reward) loss of a run, as far as it has them, and
draw them to RUN_DIR/curves.png; and to RUN_DIR/timeline.png what rank 0 did when. The
run may still go on.

  RUN_DIR      the --output-dir of the run, e.g. runs/Qwen3-4B-grpo
  --rollouts   those of the timeline, e.g. 10:13; default: the last four
  --html       write the page of `fsdptrain watch` with its data as one file; default:
               RUN_DIR/report.html
"""


def main() -> None:
    """Run the console script. Exits with 0, with 2 after an error that the user can fix, with 130 after Ctrl-C."""
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command in `argv` and return the exit code."""
    silence_libraries()
    try:
        return _command(argv)
    except FsdptrainError as error:
        report_failure(failure_of(error, rank=0))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fsdptrain --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        report_failure(
            failure_of(ConfigError(f"a name is too long for this file system: {str(error.filename)[:80]} ..."), rank=0)
        )
        return 2


def _command(argv: Sequence[str]) -> int:
    first = argv[0] if argv else ""
    if first in COMMANDS:
        return COMMANDS[first](argv[1:])
    if first == "help":
        return show_help()
    if first.isalpha() and not Path(first).exists():  # paths and hub ids get a more specific error
        raise ConfigError(
            f"{first!r} is not a command: it is fsdptrain {', fsdptrain '.join(COMMANDS)}, or only flags to train, "
            "e.g. fsdptrain --hf-checkpoint Qwen/Qwen3-4B"
        )
    return train(argv)


def train(argv: Sequence[str]) -> int:
    """Run `fsdptrain [flags]`."""
    if _asks_for_help(argv):
        return show_help()
    if "--version" in argv:
        sys.stdout.write(f"fsdptrain {__version__}\n")
        return 0
    resolved = resolve(argv)
    if resolved.config.launch.dry_run:
        if _is_rank_0():
            sys.stdout.write(to_yaml(resolved.config, resolved.sources, color=_use_color()))
            _draw_processes(resolved.config)
            if resolved.config.speed_line:
                sys.stdout.write(f"# {resolved.config.speed_line}\n")
            if resolved.config.launch.probe:
                from fsdptrain.tools.inspect.inspection import probe_line

                _check_sizes(resolved.config)
                sys.stdout.write(f"# {probe_line(resolved.config)}\n")
        return 0
    from fsdptrain import launch

    return launch.run(resolved.config, argv)


def _draw_processes(config: Config) -> None:
    """Print the rank groups if --nproc-per-node or torchrun gives the number of ranks. Does not count devices."""
    ranks = read_rank_variables()
    local = ranks.local_world_size if ranks else config.launch.nproc_per_node
    world_size = ranks.world_size if ranks else local
    if local is not None and world_size is not None:
        check_world_size(config, world_size)
        lines = [*draw_grid(config, world_size), *across_nodes(config, local)]
        sys.stdout.writelines(f"# {line}\n" for line in lines)


def _check_sizes(config: Config) -> None:
    """Check the parallel sizes against the model if --nproc-per-node gives the number of processes."""
    if config.launch.nproc_per_node is not None and config.model.backend == "fsdp":
        from fsdptrain.tools.inspect.inspection import check_sizes

        check_sizes(config, config.launch.nproc_per_node)


def export(argv: Sequence[str]) -> int:
    """Run `fsdptrain export --checkpoint DIR --output DIR`."""
    options = EXPORT | {
        flat: option for flat, option in config_options().items() if all_keys()[flat].is_marked(ExportChoice)
    }
    if _asks_for_help(argv):
        return _print_help("fsdptrain export", "Write a training checkpoint as a Hugging Face folder.", options)
    values = parse(argv, options)
    for key, option in EXPORT.items():
        if not values.get(key):
            raise ConfigError(f"{option.flag} is missing, e.g. fsdptrain export {EXPORT_EXAMPLE}")
    from fsdptrain.trainer import export_checkpoint  # lazy: imports torch

    checkpoint, output = Path(values.pop("checkpoint")), Path(values.pop("output"))
    export_checkpoint(checkpoint, output, **values)
    if _is_rank_0():
        sys.stdout.write(f"the model of {checkpoint} is written to {output}\n")
    return 0


def inspect(argv: Sequence[str]) -> int:
    """Run `fsdptrain inspect --hf-checkpoint X [--num-gpus N] [--json] [--against-checkpoint] [run flags]`."""
    if _asks_for_help(argv):
        return _print_help("fsdptrain inspect", INSPECT_USAGE, {"hf_checkpoint": HF_CHECKPOINT, **INSPECT})
    resolved = resolve(argv, INSPECT)
    _check_machine({"num_gpus": resolved.own["num_gpus"]})
    _silence_libraries()
    if resolved.config.model.backend == "megatron":
        return _inspect_megatron(resolved)
    from fsdptrain.tools.inspect import inspection  # lazy: imports torch
    from fsdptrain.tools.inspect.text import print_inspection

    own = {key: resolved.own[key] for key in ("num_gpus", "against_checkpoint")}
    found = inspection.inspect_model(resolved.config, **own)
    if resolved.own["json"]:
        _print_json({**found.as_dict(), "speed": resolved.config.speed_line})
    else:
        print_inspection(found)
        sys.stdout.write(resolved.config.speed_line and f"{resolved.config.speed_line}\n")
    inspection.raise_problems(found, strict=resolved.config.model.strict)
    return 0


def _check_machine(machine: Mapping[str, float | None]) -> None:
    for key, value in machine.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{PLAN[key].flag} must be above 0 and finite, got {value}")


def _inspect_megatron(resolved: Resolved) -> int:
    if resolved.own["against_checkpoint"]:
        raise ConfigError(
            "--against-checkpoint requires --backend fsdp: a run with --backend megatron checks it at start"
        )
    from fsdptrain.megatron.inspection import inspect_build  # lazy: imports torch
    from fsdptrain.model.probes.kernels import require_no_fallback

    found = inspect_build(resolved.config)
    if resolved.own["json"]:
        _print_json(found.as_dict())
    else:
        sys.stdout.write("".join(f"{line}\n" for line in found.lines))
    if resolved.config.model.strict:
        require_no_fallback(found.kernels)
    return 0


def plan(argv: Sequence[str]) -> int:
    """Run `fsdptrain plan --hf-checkpoint X --num-gpus N --gpu-memory-gib G [--json] [run flags]`."""
    if _asks_for_help(argv):
        return _print_help("fsdptrain plan", PLAN_USAGE, {"hf_checkpoint": HF_CHECKPOINT, **PLAN})
    resolved = resolve(argv, PLAN)
    machine = {key: resolved.own[key] for key in ("num_gpus", "gpu_memory_gib", "host_memory_gib")}
    _check_machine(machine)
    if resolved.config.model.backend == "megatron":
        raise ConfigError("fsdptrain plan supports --backend fsdp only")
    check_world_size(resolved.config, machine["num_gpus"])
    _silence_libraries()
    from fsdptrain.tools.inspect.inspection import meta_model
    from fsdptrain.tools.plan import text as plan_text  # lazy: imports torch
    from fsdptrain.tools.plan.plan import Machine, make_plan

    model, _ = meta_model(resolved.config, with_adapters=True)
    found = make_plan(model, resolved.config, Machine.of_gib(**machine))
    command = shlex.join(["fsdptrain", *without(argv, PLAN)])
    if resolved.own["json"]:
        _print_json({**plan_text.as_mapping(found, command), "speed": resolved.config.speed_line})
    else:
        plan_text.print_plan(found, command)
        sys.stdout.write(resolved.config.speed_line and f"{resolved.config.speed_line}\n")
    return 0 if found.fits else 1


def evaluate(argv: Sequence[str]) -> int:
    """Run `fsdptrain eval --checkpoint X [run flags]`."""
    from fsdptrain.tools.evaluate import CHECKPOINT, USAGE, run_arguments, table

    if _asks_for_help(argv):
        return _print_help("fsdptrain eval", USAGE, {"checkpoint": CHECKPOINT})
    arguments, output = run_arguments(argv)
    code = train(arguments)
    if code == 0 and _is_rank_0() and "--dry-run" not in arguments:
        sys.stdout.write(f"{table(output)}each sample: {output / 'samples.jsonl'}\n")
    return code


def report(argv: Sequence[str]) -> int:
    """Run `fsdptrain report RUN_DIR [--rollouts A:B]`: print a table, write curves.png and timeline.png to RUN_DIR."""
    if _asks_for_help(argv):
        sys.stdout.write(REPORT_USAGE)
        return 0
    if any(word.partition("=")[0] == "--html" for word in argv):
        from fsdptrain.tools.watch.command import write_html

        return write_html(argv)
    if not argv or argv[0].startswith("-"):
        raise ConfigError("report needs the folder of a run, e.g. fsdptrain report runs/Qwen3-4B-grpo")
    rollouts = _range(parse(argv[1:], REPORT).get("rollouts"))
    from fsdptrain.tools.report.curves import draw_curves  # lazy: imports rich
    from fsdptrain.tools.report.report import print_report
    from fsdptrain.tools.report.timeline import draw_timeline

    run = Path(argv[0])
    print_report(run)
    sys.stdout.write(f"drawn to {draw_curves(run, run / 'curves.png')}\n")
    if rollouts or (run / "timeline.jsonl").is_file():
        sys.stdout.write(f"and to {draw_timeline(run, run / 'timeline.png', rollouts)}\n")
    return 0


def watch(argv: Sequence[str]) -> int:
    """Run `fsdptrain watch RUN_DIR [RUN_DIR ...] [--port PORT]`."""
    from fsdptrain.tools.watch import command

    return command.watch(argv)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    numbers = [word for word in (first, last) if word.isascii() and word.isdigit() and len(word) < 10]
    if len(numbers) < 2 or int(first) > int(last):
        raise ConfigError(f"--rollouts must be FIRST:LAST, got {text[:80]!r}, e.g. --rollouts 10:13")
    return int(first), int(last)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "inspect": inspect,
    "plan": plan,
    "export": export,
    "report": report,
    "eval": evaluate,
    "watch": watch,
}


def show_help() -> int:
    """Print all flags with help text and default, one box per section."""
    from fsdptrain.help_text import print_run_help

    print_run_help(DESCRIPTION)
    return 0


def _print_help(prog: str, description: str, options: Mapping[str, Option]) -> int:
    from fsdptrain.help_text import print_help

    print_help(prog, description, {"": options})
    return 0


def _print_json(values: object) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def _silence_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _asks_for_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def _is_rank_0() -> bool:
    """Return whether this is rank 0. Under torchrun, all ranks get the same command line."""
    ranks = read_rank_variables()
    return ranks is None or ranks.rank == 0


def _use_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
