"""`fsdptrain eval`: the command line of a run that evaluates a model and trains nothing."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptrain.checkpoints import CONFIG_FILE, EXPORT, PROGRESS_FILE, list_checkpoints
from fsdptrain.cli import is_rank_0, train
from fsdptrain.commands import is_run, newest_checkpoint
from fsdptrain.config.eval_sets import parse_sets, settings_of
from fsdptrain.config.flags import RECIPE, Option, asks_for_help, config_options, parse
from fsdptrain.config.keys import all_keys, flatten
from fsdptrain.config.recipe import read_recipe
from fsdptrain.errors import ConfigError
from fsdptrain.launch.inputs import check_model_name
from fsdptrain.rank_variables import read_rank_variables
from fsdptrain.tools.machine import without

ALL = 10**9  # rows
TRAINING = {"algorithm", "selection", "optim", "sync", "ref", "run", "distillation"}  # sections
OF_EVALUATION = {"algorithm", "output_dir", "seed", "resume", "verify_weight_sync", "offload_train"}  # of these
OF_EVALUATION |= {"n_samples_per_eval_prompt", "eval_temperature", "eval_greedy"}
CHECKPOINT = Option(
    "--checkpoint",
    str | None,
    "Model: a hub id, a folder for from_pretrained, a run (runs/x: its newest checkpoint), or one of its checkpoints.",
    None,
)
USAGE = """\
Score a model without training it: accuracy, pass@k, mean reward.

  fsdptrain eval runs/Qwen3-4B-grpo --prompt-data questions.jsonl

Takes the options of a run too, such as --prompt-data, --reward, --rollout-engine,
and --n-samples-per-eval-prompt. All rows of --prompt-data are scored, or as many
as --eval-size says; 128 for generated data. A training checkpoint uses the options of its
run, and by default its held-out rows. --eval-prompt-data NAME=DATA NAME=DATA scores
multiple sets. A supervised checkpoint computes eval/loss; to generate, score its exported
model, runs/x/hf. Writes metrics.jsonl and samples.jsonl (a line per sample)
to --output-dir: by default runs/NAME-eval, or runs/NAME-eval-2 if that exists (not under torchrun)."""


def evaluate(argv: Sequence[str]) -> int:
    """Run `fsdptrain eval [RUN | MODEL] [run flags]`, and print the metrics."""
    if asks_for_help(argv):
        from fsdptrain.help_text import print_options

        return print_options("fsdptrain eval [RUN | MODEL]", USAGE, {"checkpoint": CHECKPOINT})
    arguments, output = run_arguments(argv)
    code = train(arguments)
    if code == 0 and is_rank_0() and not any(word.startswith("--dry-run") for word in arguments):
        sys.stdout.write(f"{table(output)}each sample: {output / 'samples.jsonl'}\n")
    return code


def run_arguments(argv: Sequence[str]) -> tuple[list[str], Path]:
    """Translate the arguments of `fsdptrain eval`. Returns those of a run, and its --output-dir."""
    own = {"checkpoint": CHECKPOINT}
    if argv and not argv[0].startswith("-"):  # fsdptrain eval runs/x
        argv = [CHECKPOINT.flag, *argv]
    given = parse(argv, {"recipe": RECIPE, **config_options(), **own})
    if not given.get("checkpoint"):
        raise ConfigError("--checkpoint is missing, e.g. fsdptrain eval Qwen/Qwen3-4B --prompt-data x.jsonl")
    if "hf_checkpoint" in given:
        raise ConfigError("--hf-checkpoint: fsdptrain eval takes the model by --checkpoint; remove it")
    for key in filter(_only_trains, given):
        raise ConfigError(f"{all_keys()[key].flag} has no effect on fsdptrain eval: remove it")
    model, name = _model(given["checkpoint"])
    if "recipe" in given and model[0] == RECIPE.flag:
        raise ConfigError(f"--recipe: the options of {given['checkpoint']} are in {model[1]}; remove it")
    recipe = model[1] if model[0] == RECIPE.flag else given.get("recipe")
    values = {**(flatten(read_recipe(recipe)) if recipe else {}), **given}
    data, rows = given.get("prompt_data"), list[str]()
    if data is not None and model[0] == RECIPE.flag and data.startswith("reasoning_gym:"):
        columns = (config_options()[key] for key in ("input_key", "label_key"))  # of the run: these data have others
        rows = [word for option in columns for word in (option.flag, str(option.default))]
    named = parse_sets(given.get("eval_prompt_data", []))
    sets = [source for _, source in named]
    if sets and "prompt_data" not in values:  # which --reward auto and --system-prompt auto follow
        rows += ["--prompt-data", sets[0]]
    if data is not None and "eval_prompt_data" not in given and data != "environment":
        rows, sets = [*rows, "--eval-prompt-data", data], [data]
    if "eval_set_options" not in given:
        rows += _set_options(dict(named), values, all_rows="eval_size" not in given)
    rows += ["--eval-size", str(ALL)] * ("eval_size" not in given and _are_files(sets))
    output = Path(given.get("output_dir") or _unused(f"runs/{name}-eval"))
    flags = ["--num-rollout", "0", "--no-export", "--eval-interval", "1"]
    if model[0] == RECIPE.flag:  # its checkpoint or export has the adapter; its limits may name sets of the run
        flags += [
            f"{all_keys()[key].flag}=None" for key in ("lora_init", "eval_metric", "stop_when") if values.get(key)
        ]
    if values.get("algorithm") != "sft":  # a supervised run computes a loss, and generates nothing
        flags += ["--log-num-samples", str(ALL)]
    return [*model, *rows, *without(argv, own), *flags, "--output-dir", str(output)], output


def _only_trains(key: str) -> bool:
    section = all_keys()[key].section if key in all_keys() else ""
    return key == "log_num_samples" or (section in TRAINING and key not in OF_EVALUATION)


def _are_files(sources: Sequence[str]) -> bool:
    """Whether all rows can be scored; generated data have too many."""
    return bool(sources) and not any(source.startswith("reasoning_gym:") for source in sources)


def _set_options(named: Mapping[str, str], values: Mapping[str, Any], *, all_rows: bool) -> list[str]:
    """Return the settings of the run for these sets, and what scores all rows of files beside generated ones."""
    settings = settings_of(values.get("eval_set_options") or {})
    kept = [f"{name}.{setting}={json.dumps(value)}" for name, setting, value in settings if name in named]
    if all_rows and not _are_files([*named.values()]):
        kept += [f"{name}.size={ALL}" for name, source in named.items() if _are_files([source])]
    return ["--eval-set-options", *kept] if named else []


def _unused(folder: str) -> str:
    """Return `folder`, or `folder-2`, ... if there is one. Under torchrun always `folder`: ranks must agree."""
    if read_rank_variables():
        return folder
    names = itertools.chain([folder], (f"{folder}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def _model(given: str) -> tuple[list[str], str]:
    """Return the flags for the model of --checkpoint, and its name.

    A checkpoint has the options of its run. For the folder of a run, it is the newest checkpoint, or the exported model
    if the run keeps no checkpoints.
    """
    path = Path(given)
    if is_run(path):
        exported = path / EXPORT
        if exported.is_dir() and not list_checkpoints(path):
            recipe = ["--recipe", str(path / CONFIG_FILE)]
            return [*recipe, "--hf-checkpoint", str(exported), "--resume", "never"], path.resolve().name
        path = newest_checkpoint(path)
    if not (path / PROGRESS_FILE).is_file():
        check_model_name(given, CHECKPOINT.flag)
        folders = [path.resolve(), path.resolve().parent]  # that of the run, if it is the exported model of one
        name = f"{folders[1].name}-{path.name}" if is_run(folders[1]) else folders[0].name
        return ["--hf-checkpoint", given, "--resume", "never"], name
    run = path.resolve().parent.parent
    return ["--recipe", str(run / CONFIG_FILE), "--resume", str(path)], f"{run.name}-{path.name}"


def table(folder: Path) -> str:
    """Return the metrics of the evaluation in the folder, one on a line."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {name: value for row in lines for name, value in row.items() if name.startswith("eval/")}
    width = max(map(len, found), default=0)
    return "".join(f"{name.removeprefix('eval/'):<{width}} {value:.4g}\n" for name, value in found.items())
