"""Sections of the data, supervised or not, the rewards and the environment."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fsdptrain.config.rules import COLUMN, NEUTRAL, RL_ONLY, Excludes, IdleWith, Package, Problem, Requires
from fsdptrain.config.section import Names, Section
from fsdptrain.registry import misnamed

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

LossOn = Literal["assistant", "last", "all"]
_NO_PASS = "where nothing is evaluated: set --eval-interval, or remove it"


class DataConfig(Section):
    """Prompts and their tokenization."""

    NAME = "data"

    prompt_data: str = Field(default="reasoning_gym:gsm_symbolic", min_length=1)
    """`reasoning_gym:<task>[?key=value&...]`, a .jsonl, .json, .csv, .parquet or .arrow file, a folder, a Hub data set
    such as `openai/gsm8k?name=main&split=train`, or `environment` for the rows of --environment."""
    input_key: Annotated[str, COLUMN] = "prompt"
    """Column of the prompt: text or a list of chat messages; `column.key` for a value in a column of mappings. For more
    forms with `--algorithm sft`, see docs/sft.md."""
    label_key: Annotated[str, COLUMN] = "label"
    """Column of the reference answer, or `column.key` in a column of mappings, e.g. `reward_model.ground_truth`; with
    `--algorithm sft`, of the response: text or the messages of a conversation."""
    reward_key: Annotated[str | None, COLUMN, RL_ONLY] = None
    """Column that names the rewards of --reward that score the row: a name, e.g. `math`, or a list. Default: all."""
    environment_key: Annotated[str | None, COLUMN, RL_ONLY, Requires("environment")] = None
    """Column that names the environment of the row, e.g. `Calculator` of --environment; empty for a single turn."""
    apply_chat_template: bool = True
    """Apply the tokenizer's chat template to prompts. Off: use the text unchanged."""
    chat_template_kwargs: Annotated[dict[str, Any], Requires("apply_chat_template")] = Field(default={})
    """Arguments of the chat template, e.g. `enable_thinking: false`."""
    system_prompt: str = "auto"
    """System message before each prompt; "" for none. `auto`: the environment's; for reasoning_gym data, an instruction
    to use <answer> tags; else none."""
    eval_prompt_data: Annotated[Names, Requires("eval_interval"), IdleWith("eval_size=0")] = Field(default=[])
    """Evaluation data, in any form of --prompt-data; or multiple sets: NAME=DATA NAME=DATA, reported as eval/NAME.
    Default: rows held out from --prompt-data."""
    eval_set_options: Annotated[dict[str, Any], NEUTRAL, Requires("eval_prompt_data")] = Field(default={})
    """Settings per evaluation set, e.g. `gsm8k.temperature=0 gsm8k.samples=4`: see docs/evaluation.md."""
    eval_size: Annotated[int | None, Requires("eval_interval")] = Field(default=None, ge=0)
    """Prompts to hold out for evaluation; 0: none. Default: 128, but at most a tenth of the data. [prompts]"""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.reward_key is not None and len(config.reward.reward) < 2:
            yield f"--reward-key {self.reward_key} has no effect with one reward: name more by --reward"
        if self.prompt_data == "environment" and not config.environment.environment:
            yield "--prompt-data environment are the rows of an environment: name it by --environment"
        if self.eval_prompt_data:
            from fsdptrain.config.eval_sets import problems

            yield from problems(config)


class RewardConfig(Section):
    """Reward functions."""

    NAME = "reward"

    reward: Annotated[Names, RL_ONLY] = Field(default=["auto"], min_length=1)
    """One or more of auto, reasoning_gym, reasoning_gym_strict, math, exact, format, code, environment, none (always 0)
    or your own `package.module:function` or `file.py:function`, each with an optional `=weight`."""
    max_unscored_fraction: Annotated[float, NEUTRAL, RL_ONLY] = Field(default=0.1, ge=0.0, le=1.0)
    """Stop if more than this fraction of a rollout's samples got no reward."""
    reward_timeout: Annotated[float | None, NEUTRAL, RL_ONLY] = Field(default=None, gt=0.0)
    """Time limit of a --reward call; of a batched one, for all samples of a rank. On timeout the sample gets no reward,
    and its process is replaced. The run ends if timeouts cost a rank half of --dist-timeout, divided by 1 +
    --max-staleness, in one rollout. Default: 300, or less if --dist-timeout requires it. [s]"""
    reward_workers: Annotated[int | None, NEUTRAL, RL_ONLY] = Field(default=None, ge=0)
    """Processes per rank and --reward. 0: the trainer calls it, without a time limit. Default: the machine's cores
    divided by its ranks, at most 8. Async rewards have none. [processes]"""
    pass_threshold: Annotated[float, Requires("@evaluates", reason=_NO_PASS), RL_ONLY] = 1.0
    """Evaluations count a response as correct if its reward is at least this."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.reward_timeout is not None and self.reward_timeout > config.reward_patience:
            yield (
                f"--reward-timeout {self.reward_timeout:g} is longer than other ranks wait for rewards, "
                f"{config.reward_patience:g} s: lower it, or raise --dist-timeout"
            )


class EnvironmentConfig(Section):
    """Multi-turn episodes."""

    NAME = "environment"
    RULES = (Requires("environment", "environment_command"),)

    environment: Annotated[Names, RL_ONLY] = Field(default=[])
    """Environment that answers the model, or an agent (an async function): `package.module:name` or a plug-in; more
    than one with --environment-key. See docs/environments.md."""
    environment_command: Annotated[str | None, RL_ONLY, Excludes("environment"), Package("starlette", "agents")] = None
    """Program that runs one episode of an agent; it calls the model at OPENAI_BASE_URL. See docs/environments.md."""
    environment_kwargs: Annotated[dict[str, Any], Requires("environment")] = Field(default={})
    """Arguments of the constructor, or the agent's function. With --environment-key, per name of the environment."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum turns per episode. [model responses]"""
    max_observation_len: int = Field(default=512, ge=1)
    """Maximum length of an observation; longer ones are truncated. [tokens]"""
    environment_timeout: Annotated[float | None, NEUTRAL] = Field(default=None, gt=0.0)
    """Time limit of an answer (default: 60) or of an agent's episode (default: a third of --dist-timeout). [s]"""
    environment_workers: Annotated[int, NEUTRAL] = Field(default=32, ge=1)
    """Concurrent environment calls, or episodes of an agent, per rank. [threads]"""

    def problems(self, config: "Config") -> Iterator[Problem]:
        for name in self.environment:
            yield from misnamed("--environment", name, (), "environments")
        if len(self.environment) > 1 and config.data.environment_key is None:
            yield f"--environment {' '.join(self.environment)}: choose one, or name each row's by --environment-key"

    @property
    def has_episodes(self) -> bool:
        return bool(self.environment or self.environment_command)


class SftConfig(Section):
    """Supervised fine-tuning: trained tokens."""

    NAME = "sft"
    PREFIX = "sft_"
    RULES = (Requires("algorithm=sft"),)

    loss_on: LossOn = "assistant"
    """Tokens with a loss: all assistant turns, the last one, or all tokens. Plain text: all."""


def sft_options(config: "Config") -> SftConfig | None:
    """Return the options of supervised data, if the run is supervised."""
    return config.sft if config.algorithm.algorithm == "sft" else None
