"""Sections of the data, the rewards and the environment."""

import re
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from fsdptrain.config.rules import COLUMN, GENERATES, NEUTRAL, RL_ONLY, Excludes, IdleWith, Problem, Requires
from fsdptrain.config.section import Names, Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_NO_PASS = "where nothing is evaluated: set --eval-interval, or remove it"


class DataConfig(Section):
    """Prompts and their tokenization."""

    NAME = "data"

    prompt_data: Names = Field(default=["reasoning_gym:gsm_symbolic"], min_length=1)
    """`reasoning_gym:<task>[?key=value&...]`, a .jsonl, .json, .csv, .parquet or .arrow file, a folder or the name of a
    `datasets` set, or `environment` for the rows of --environment. Several sources have weights: `a.jsonl=0.7 b=0.3`.
    See docs/data.md."""
    prompt_data_streaming: bool = False
    """Read --prompt-data in order while training, without downloading or indexing it first."""
    prompt_data_buffer: Annotated[int, Requires("prompt_data_streaming")] = Field(default=1000, ge=1)
    """Rows of a stream to shuffle together. [rows]"""
    prompt_split: str = "train"
    """Training split of a `datasets` data set."""
    input_key: Annotated[str, COLUMN] = "prompt"
    """Column of the prompt: a string or a list of chat messages; `column.key` for a value in a column of mappings. For
    more forms with `--algorithm sft`, see docs/sft.md."""
    label_key: Annotated[str, COLUMN] = "label"
    """Column of the reference answer, or `column.key` in a column of mappings, e.g. `reward_model.ground_truth`; with
    `--algorithm sft`, of the response: a string or the messages of a conversation."""
    metadata_key: Annotated[str | None, COLUMN] = None
    """Column of a mapping: `prompt.metadata` of rewards and environments. Default: all columns but images."""
    apply_chat_template: bool = True
    """Apply the tokenizer's chat template to prompts. Off: use the text unchanged."""
    chat_template_kwargs: Annotated[dict[str, Any], Requires("apply_chat_template")] = Field(default={})
    """Arguments of the chat template, e.g. `enable_thinking: false`."""
    system_prompt: str = "auto"
    """System message before each prompt; "" for none. `auto`: that of the environment; for reasoning_gym data, an
    instruction to use <answer> tags; else none."""
    eval_prompt_data: Annotated[str | None, Requires("eval_interval"), IdleWith("eval_size=0")] = None
    """Evaluation data, in any form of --prompt-data. Default: rows held out from --prompt-data."""
    eval_size: Annotated[int | None, Requires("eval_interval")] = Field(default=None, ge=0)
    """Prompts to hold out for evaluation; 0: none. Default: 128, but at most a tenth of the data. [prompts]"""
    data_size: int = Field(default=100_000, ge=1)
    """Rows to draw from an infinite generator such as reasoning-gym. [prompts]"""

    @property
    def data_name(self) -> str:
        """--prompt-data, as one text."""
        return " ".join(self.prompt_data)

    @property
    def sources(self) -> dict[str, tuple[str, float]]:
        """Sources of --prompt-data: name -> (what to load, weight). One source has no name."""
        if len(self.prompt_data) == 1:
            return {"": (self.prompt_data[0], 1.0)}
        found: dict[str, tuple[str, float]] = {}
        for text in self.prompt_data:
            spec, _, weight = text.rpartition("=")
            short = spec.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2]
            short = short.removesuffix(PurePath(short).suffix) if PurePath(short).suffix in FILE_SUFFIXES else short
            numbered = (f"{short}_{number}" for number in count(2))
            found[next(name for name in chain([short], numbered) if name not in found)] = (spec, float(weight))
        return found

    def source(self, spec: str) -> "DataConfig":
        """Return a copy whose only source is `spec`."""
        return self.model_copy(update={"prompt_data": [spec]})

    def problems(self, config: "Config") -> Iterator[Problem]:
        yield from self._weight_problems(config)
        if "environment" in self.prompt_data and config.environment.environment is None:
            yield "--prompt-data environment are the rows of an environment: name it by --environment"
        if self.eval_prompt_data == "environment":
            yield "--eval-prompt-data environment: remove it, prompts are held out from --prompt-data environment"

    def _weight_problems(self, config: "Config") -> Iterator[Problem]:
        several = len(self.prompt_data) > 1
        for text in self.prompt_data:
            weight = re.fullmatch(r".*=((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", text)
            if several and (weight is None or float(weight[1]) == 0):
                yield (
                    f"--prompt-data {text}: each of several sources needs a weight above 0, as in "
                    "--prompt-data a.jsonl=0.7 b.jsonl=0.3"
                )
            elif not several and weight is not None and "?" not in text and not Path(text).exists():
                yield f"--prompt-data {text}: a weight has no effect on one source: remove ={weight[1]}"
        if several and any(text.startswith("environment=") for text in self.prompt_data):
            yield "--prompt-data environment cannot be mixed with other sources: use one"

    def source_problems(self, config: "Config") -> Iterator[Problem]:
        """Yield options that have no effect on the kind of data that --prompt-data and --eval-prompt-data name."""
        specs = [spec for spec, _ in self.sources.values()]
        names = [name.partition("?")[0] for name in (*specs, self.eval_prompt_data) if name]
        generated = [name.startswith("reasoning_gym:") for name in names]
        files = [name.endswith(FILE_SUFFIXES) or name == "environment" for name in names]
        if self.prompt_data_streaming:
            for spec in specs:
                if spec.startswith("reasoning_gym:") or spec == "environment":
                    yield f"--prompt-data-streaming has no effect on --prompt-data {spec}, which is no table: remove it"
        if all(known or name == "environment" for known, name in zip(generated, names, strict=True)):
            reason = "with data of reasoning_gym or an environment, which have no columns: remove it"
            yield from config.without_effect(config.columns, reason)
        if not any(generated):
            reason = "on data of a fixed size: only reasoning_gym data is generated"
            yield from config.without_effect(["data_size"], reason)
        if all(known or is_file for known, is_file in zip(generated, files, strict=True)):
            reason = "on files and generated data: only `datasets` has splits"
            yield from config.without_effect(["prompt_split"], reason)


_JUDGE = Requires("@uses_judge", reason="without --reward judge: add it, or remove this")


class RewardConfig(Section):
    """Reward functions."""

    NAME = "reward"

    reward: Annotated[Names, GENERATES] = Field(default=["auto"], min_length=1)
    """One or more of auto, reasoning_gym, reasoning_gym_strict, math, exact, format, code, judge, environment,
    none (always 0) or `package.module:function`, each with an optional `=weight`."""
    max_unscored_fraction: Annotated[float, NEUTRAL, RL_ONLY] = Field(default=0.1, ge=0.0, le=1.0)
    """Stop if more than this fraction of a rollout's samples could not be scored."""
    reward_timeout: Annotated[float | None, NEUTRAL, GENERATES] = Field(default=None, gt=0.0)
    """Deadline of one --reward call; of a reward of lists, for all samples of a rank. The sample is then unscored, and
    its process is killed and replaced. The run ends if late calls of all rewards cost a rank half of --dist-timeout,
    divided by 1 + --max-staleness, in one rollout. Default: 300, or less if --dist-timeout requires it. [s]"""
    reward_workers: Annotated[int | None, NEUTRAL, GENERATES] = Field(default=None, ge=0)
    """Processes per rank and per --reward. 0: none; the trainer calls it, and cannot kill a call. Default: the cores of
    the machine divided by its ranks, at most 8. Async rewards have none. [processes]"""
    judge_url: Annotated[str | None, NEUTRAL, _JUDGE] = None
    """OpenAI-compatible API of --reward judge, e.g. `http://127.0.0.1:8000/v1`. The key is the environment variable
    JUDGE_API_KEY."""
    judge_model: Annotated[str | None, _JUDGE] = None
    """Model that judges."""
    judge_rubric: Annotated[str | None, _JUDGE] = None
    """Message to the judge, or a file with it; {prompt}, {response} and {label} are replaced. It must request a score
    as <score>7</score> or {"score": 7}. Default: see docs/rewards.md."""
    judge_max_score: Annotated[float, _JUDGE] = Field(default=10.0, gt=0.0)
    """Highest score of the rubric, which is the reward 1; 0 is the reward 0."""
    pass_threshold: Annotated[float, Requires("@evaluates", reason=_NO_PASS), GENERATES] = 1.0
    """Minimum reward of a correct response in evaluations."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if config.uses_judge and not (self.judge_url and self.judge_model):
            yield "--reward judge needs --judge-url and --judge-model: set both"
        if self.judge_url and not self.judge_url.startswith(("http://", "https://")):
            yield f"--judge-url {self.judge_url!r} is no address: write e.g. http://127.0.0.1:8000/v1"


class EnvironmentConfig(Section):
    """Multi-turn episodes."""

    NAME = "environment"
    RULES = (Requires("environment", "environment_command"),)

    environment: Annotated[str | None, GENERATES] = None
    """Environment that replies to the model: `package.module:Class` (or a function), or a plug-in name, see
    docs/environments.md. Or an agent: `package.module:function`, an async function, see docs/agents.md."""
    environment_command: Annotated[str | None, GENERATES, Excludes("environment")] = None
    """Program that runs one episode of an agent; it calls the model at OPENAI_BASE_URL. See docs/agents.md."""
    episode_timeout: Annotated[float | None, NEUTRAL] = Field(default=None, gt=0.0)
    """Deadline of an agent's episode, which is unscored if it misses it. Default: a third of --dist-timeout. [s]"""
    environment_kwargs: Annotated[dict[str, Any], Requires("environment")] = Field(default={})
    """Arguments of the environment's constructor, or of the agent's function."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum turns per episode. [model responses]"""
    max_observation_len: int = Field(default=512, ge=1)
    """Maximum length of an observation; longer ones are truncated. [tokens]"""
    environment_timeout: Annotated[float, NEUTRAL] = Field(default=60.0, gt=0.0)
    """Deadline of one environment reply; an episode that misses it is unscored. [s]"""
    environment_workers: Annotated[int, NEUTRAL] = Field(default=32, ge=1)
    """Concurrent environment calls, or episodes of an agent, per rank. [threads]"""

    @property
    def has_episodes(self) -> bool:
        return bool(self.environment or self.environment_command)
