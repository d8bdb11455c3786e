"""Sections of the run: length, evaluation, checkpoints, loggers and processes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fsdptrain.config.rules import (
    EXPORT_CHOICE,
    FSDP_ONLY,
    NEUTRAL,
    REFUSED,
    RL_ONLY,
    IdleWith,
    Package,
    Problem,
    Requires,
)
from fsdptrain.config.section import Names, Section
from fsdptrain.registry import misnamed

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_PACKAGES = tuple(Package(name, name, name) for name in ("wandb", "trackio", "tensorboard", "mlflow"))
LOGGER_NAMES = ("console", *(package.value for package in _PACKAGES))
_EVALUATES = (Requires("eval_interval"), IdleWith("eval_size=0", "replay_rollouts"))
_OF_EVALUATIONS = (*_EVALUATES, RL_ONLY)


def profiled(steps: str | None) -> tuple[int, int]:
    """Return the first and the last step of --profile-steps, counted from 1; (0, 0) if it is not given."""
    first, _, last = (steps or "0").partition(":")
    return int(first), int(last or first)


class RunConfig(Section):
    """Run length, evaluation and checkpoints."""

    NAME = "run"
    ON_RESUME = NEUTRAL

    output_dir: str = ""
    """Output directory: config.yaml, metrics.jsonl, checkpoints and the exported model. Default:
    runs/<model>-<algorithm>, e.g. runs/Qwen3-4B-grpo."""
    num_rollout: int = Field(default=200, ge=0)
    """Rollouts to run: the steps of the run. With `--algorithm sft`: optimizer steps."""
    seed: Annotated[int, REFUSED] = Field(default=0, gt=-(2**62), lt=2**62)
    """Seed of everything except sampling and the order of prompts (--rollout-seed)."""
    resume: str = Field(default="auto", min_length=1)
    """`auto`: resume from the newest checkpoint in output_dir, if any (Ctrl-C saves one); a changed model, algorithm,
    data or reward is rejected. `never`: fail if output_dir is in use. Or a checkpoint folder, which allows changes."""
    save_interval: Annotated[int, Requires("keep_last")] = Field(default=50, ge=0)
    """Rollouts between checkpoints. 0: only the last one, and any kept by --keep-best; none if --keep-last is 0."""
    keep_last: int = Field(default=2, ge=0)
    """Number of newest checkpoints to keep; 0: write none."""
    keep_best: Annotated[int, Requires("keep_last"), *_EVALUATES] = Field(default=0, ge=0)
    """Also keep the checkpoints of the N best steps by --eval-metric. Evaluations among the N best write them."""
    keep_every: Annotated[int, Requires("keep_last"), Requires("save_interval")] = Field(default=0, ge=0)
    """Also keep each checkpoint whose step is a multiple of this, itself a multiple of --save-interval. 0: none."""
    export_every_save: Annotated[bool, Requires("keep_last")] = False
    """Export the model with each checkpoint too, to its folder hf."""
    async_save: Annotated[bool, Requires("keep_last"), Requires("save_interval", "keep_best"), FSDP_ONLY] = False
    """Continue training while a checkpoint is written from a copy of weights and optimizer state in host memory."""
    export: bool = True
    """Export the trained model to output_dir/hf at the end, for from_pretrained."""
    export_dtype: Annotated[
        Literal["auto", "source", "bfloat16", "float32"], EXPORT_CHOICE, Requires("export", "export_every_save")
    ] = "auto"
    """Dtype of the exported model. `auto`: the compute dtype, so that the export is the model that was evaluated.
    `source`: the dtype of --hf-checkpoint. Tensors stored there in more precision than the others keep it."""
    push_to_hub: Annotated[str | None, Requires("export")] = None
    """Private Hugging Face Hub repository, e.g. name/model, to upload the exported model to at the end."""
    eval_interval: Annotated[int, IdleWith("eval_size=0")] = Field(default=20, ge=0)
    """Rollouts between evaluations; one also runs before the first and after the last rollout. 0: never."""
    n_samples_per_eval_prompt: Annotated[int, *_OF_EVALUATIONS] = Field(default=1, ge=1)
    """Completions per evaluation prompt; reports pass@k for each power of two up to this number."""
    eval_temperature: Annotated[float, *_OF_EVALUATIONS] = Field(default=1.0, ge=0.01, le=100.0)
    """Sampling temperature of evaluations."""
    eval_greedy: Annotated[bool, *_OF_EVALUATIONS] = False
    """Evaluate greedy decoding too, as eval/heldout_greedy."""
    eval_metric: Annotated[str | None, *_EVALUATES] = None
    """Evaluation metric that selects the best step: lowest is best for loss, perplexity, truncated and unscored, else
    highest. Default: accuracy, or loss with `--algorithm sft`, of the first evaluation set."""
    early_stop_evals: Annotated[int, *_EVALUATES] = Field(default=0, ge=0)
    """Early stopping: end the run after this many evaluations in a row without a new best --eval-metric. 0: never."""
    stop_when: str | None = None
    """Stop the run after the first step at which a metric of training or evaluation is >, >=, < or <= a number, e.g.
    'eval/heldout/accuracy>0.9'. Default: none."""
    profile_steps: Annotated[str | None, Requires("num_rollout>0")] = Field(
        default=None, pattern=r"^[1-9]\d*(:[1-9]\d*)?$"
    )
    """Steps to profile, FIRST:LAST, counted from 1, e.g. 3:5. Each rank writes a trace of torch's profiler to
    output_dir/profile, and on a GPU a memory snapshot. Default: none."""
    record_rollouts: Annotated[bool, RL_ONLY, Requires("num_rollout>0"), IdleWith("replay_rollouts")] = False
    """Write the samples of each step to output_dir/rollouts, for --replay-rollouts. See docs/run_folder.md."""
    replay_rollouts: Annotated[str | None, RL_ONLY, Requires("num_rollout>0")] = Field(default=None, min_length=1)
    """Train on the samples in this folder, from --record-rollouts, without an engine and evaluations."""
    verify_weight_sync: bool = True
    """Check after the first weight sync, and after each one that follows a suspicious mismatch/abs_mean, that the
    engine has the trainer's weights; stop the run if not."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        first, last = profiled(self.profile_steps)
        if not first <= last <= self.num_rollout:
            yield (
                f"--profile-steps {self.profile_steps} must be FIRST:LAST within the {self.num_rollout} steps of "
                "--num-rollout, e.g. 3:5"
            )
        if self.keep_every and self.keep_every % self.save_interval:
            yield (
                f"--keep-every {self.keep_every} must be a multiple of --save-interval {self.save_interval}, "
                "at which checkpoints are written"
            )
        if self.stop_when is not None:
            from fsdptrain.config.stop_when import StopWhen

            if StopWhen.parse(self.stop_when).of_evaluation and (self.replay_rollouts or not config.evaluates):
                yield f"--stop-when {self.stop_when} needs --eval-interval, --eval-size above 0, no --replay-rollouts"


class LogConfig(Section):
    """Metric loggers."""

    NAME = "log"
    PREFIX = "log_"
    ON_RESUME = NEUTRAL

    to: Annotated[Names, *_PACKAGES] = Field(default=["console"])
    """Loggers besides metrics.jsonl, which is always written: console, wandb (WANDB_MODE=offline: no network), trackio,
    tensorboard, mlflow, or a plug-in. The list replaces the default."""
    project: str = "fsdptrain"
    """Project name for wandb, trackio (in TRACKIO_DIR, by default `trackio` beside output_dir) and mlflow (in
    MLFLOW_TRACKING_URI, by default `mlflow.db` there)."""
    run_name: str | None = None
    """Run name for wandb, trackio and mlflow. Default: the last component of output_dir."""
    num_samples: Annotated[int, RL_ONLY] = Field(default=4, ge=0)
    """Samples to log per rollout and evaluation, in samples.jsonl and on the console. 0: none."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        for name in self.to:
            yield from misnamed("--log-to", name, LOGGER_NAMES, "loggers")
        if len(set(self.to)) < len(self.to):
            yield f"--log-to names a logger twice: {', '.join(self.to)}"
        if {*self.to} <= {"console", "tensorboard"}:
            reason = "without a logger that has projects: add e.g. --log-to console trackio"
            yield from config.without_effect(["log_project", "log_run_name"], reason)


class LaunchConfig(Section):
    """Processes on this machine. For multiple machines, use torchrun: see docs/multi_node.md."""

    NAME = "launch"
    ON_RESUME = NEUTRAL

    nproc_per_node: int | None = Field(default=None, ge=1)
    """Processes on this machine, e.g. 2 for two GPUs; on multiple machines, see docs/multi_node.md. Default: one per
    visible GPU, or one without GPUs."""
    dist_timeout: int = Field(default=1800, ge=1)
    """Longest wait of a rank for the others. A longer one ends the run. [s]"""
    dry_run: bool | Literal["full"] = False
    """Check everything that needs no weights, print the options that are set and the data, and exit. `full`: print each
    option with its source, as a recipe."""
