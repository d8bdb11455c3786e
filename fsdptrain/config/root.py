"""`Config`: all sections, validated, with derived values."""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from fsdptrain.config import checks
from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig, ShapingConfig
from fsdptrain.config.keys import SECTIONS, group_by_section
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_OPTIONS, is_own, preset_values
from fsdptrain.config.problems import field_problem
from fsdptrain.config.section import Section
from fsdptrain.config.sections import (
    BatchConfig,
    DataConfig,
    EnvironmentConfig,
    FsdpConfig,
    LaunchConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
)
from fsdptrain.config.sync import SyncConfig


class Config(Section):
    """Configuration of a run.

    `Config(**values)` accepts sections and flat keys. Values that are not given come from the algorithm's preset.
    Raises ConfigError, one line with the flag, for an unknown key, an invalid value or an invalid combination.
    """

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    shaping: ShapingConfig = ShapingConfig()
    selection: SelectionConfig = SelectionConfig()
    optim: OptimConfig = OptimConfig()
    batch: BatchConfig = BatchConfig()
    fsdp: FsdpConfig = FsdpConfig()
    parallel: ParallelConfig = ParallelConfig()
    megatron: MegatronConfig = MegatronConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    ref: RefConfig = RefConfig()
    router: RouterConfig = RouterConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()

    def __init__(self, **values: Any) -> None:
        super().__init__(**build_sections(_with_preset(values)))
        checks.check(self)

    @property
    def compute_dtype_name(self) -> Literal["bfloat16", "float16", "float32"]:
        if self.model.fp16:
            return "float16"
        return "bfloat16" if self.model.bf16 else "float32"

    @property
    def samples_per_rollout(self) -> int:
        """Samples per rollout; with `--algorithm sft`, per optimizer step. [samples]"""
        if self.algorithm.algorithm == "sft":
            return self.batch.global_batch_size or self.rollout.batch_size
        return self.rollout.batch_size * self.algorithm.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout, over all its epochs."""
        if self.batch.steps_per_rollout is not None:
            return self.batch.steps_per_rollout
        per_epoch = self.samples_per_rollout // (self.batch.global_batch_size or self.samples_per_rollout)
        return per_epoch * self.batch.epochs_per_rollout

    @property
    def on_policy(self) -> bool:
        """Whether each rollout is one optimizer step, so the trained policy is the one that generated."""
        return self.steps_per_rollout == 1

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy changes within a rollout and the loss compares with the old policy."""
        loss = self.algorithm.loss
        return not self.on_policy and (is_own(loss) or "use_rollout_logprobs" in LOSS_OPTIONS[loss].reads)

    @property
    def scores_policy(self) -> bool:
        """Whether the trainer computes policy logprobs before the first update, for the loss or the KL reward term."""
        return not self.algorithm.use_rollout_logprobs and (
            self.needs_old_logprobs or self.algorithm.kl_reward_coef > 0
        )

    @property
    def advantage_scale(self) -> str:
        """Resolved scale: group, batch, whiten or none. `auto` means none for a custom estimator."""
        chosen = self.algorithm.advantage_scale
        return ADVANTAGE_SCALES.get(self.algorithm.advantage_estimator, "none") if chosen == "auto" else chosen

    @property
    def overlong_buffer(self) -> int:
        """--overlong-buffer, or a fifth of the response limit, as 4096 of 20480 in DAPO. [tokens]"""
        return self.shaping.overlong_buffer or max(1, self.rollout.max_response_len // 5)

    @property
    def scoring_temperature(self) -> float:
        """Temperature for the trainer's logprobs: that of the rollout; 1 in supervised training."""
        return 1.0 if self.algorithm.algorithm == "sft" else self.rollout.temperature

    @property
    def is_truncated(self) -> bool:
        """Whether sampling excludes some of the vocabulary."""
        return (self.rollout.top_p, self.rollout.top_k, self.rollout.min_p) != (1.0, None, 0.0)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term in the loss or the reward."""
        return self.algorithm.kl_loss_coef > 0 or self.algorithm.kl_reward_coef > 0

    @property
    def total_optimizer_steps(self) -> int:
        return self.run.num_rollout * self.steps_per_rollout

    @property
    def max_tokens_per_pack(self) -> int:
        """Pack limit over all processes that share a pack. [tokens]"""
        return self.batch.max_tokens_per_gpu * self.parallel.context_parallel_size

    @property
    def pack_budget(self) -> str:
        """Flags that determine `max_tokens_per_pack`, with their values."""
        context = self.parallel.context_parallel_size
        beside = f" x --context-parallel-size {context}" if context > 1 else ""
        return f"--max-tokens-per-gpu {self.batch.max_tokens_per_gpu}{beside}"

    @property
    def pack_copies(self) -> int:
        """Number of neighboring processes that receive the same packs and share the work on them."""
        if self.parallel.backend == "megatron":
            split = self.megatron
            return split.tensor_parallel * split.context_parallel * split.pipeline_parallel
        return self.parallel.tensor_parallel_size * self.parallel.context_parallel_size

    @property
    def needs_own_attention(self) -> bool:
        """Whether the options require attention features that flash-attn kernels do not support."""
        return self.parallel.context_parallel_size > 1 or self.batch.prefix_sharing == "on"

    @property
    def prompt_budget(self) -> int:
        """Prompt limit: --rollout-max-prompt-len, or the room that a response leaves in a pack. [tokens]"""
        if self.rollout.max_prompt_len is not None:
            return self.rollout.max_prompt_len
        response = 1 if self.algorithm.algorithm == "sft" else self.rollout.max_response_len
        return self.max_tokens_per_pack - response

    @property
    def longest_sequence(self) -> int:
        """Limit of prompt plus response in training. [tokens]"""
        most = self.max_tokens_per_pack
        if self.algorithm.algorithm == "sft":  # responses come from the data
            return most
        return min(most, self.prompt_budget + self.rollout.max_response_len)

    @property
    def reward_patience(self) -> float:
        """Time limit for hanging --reward calls of one rollout on a rank. [s]

        Other ranks wait during this time: half of --dist-timeout, divided by the number of rollouts in flight.
        """
        return self.launch.dist_timeout / 2 / (1 + self.sync.max_staleness)

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation prompts and an evaluation interval."""
        return self.run.eval_interval > 0 and self.data.eval_size != 0

    @property
    def generates(self) -> bool:
        """Whether the run generates completions, for training or evaluation."""
        return self.algorithm.algorithm != "sft" or self.evaluates


def _with_preset(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section -> name -> value, with missing values filled from the algorithm's preset."""
    grouped = group_by_section(values)
    given = grouped.get("algorithm", {})
    preset = preset_values(given.get("algorithm", AlgorithmConfig().algorithm), given.get("loss"))
    by_section = group_by_section(preset)
    return {name: {**by_section.get(name, {}), **grouped.get(name, {})} for name in {**grouped, **by_section}}


def build_sections(values: Mapping[str, Any]) -> dict[str, Section]:
    """Build and validate the sections in `values`. Raises ConfigError for the first invalid field."""
    sections: dict[str, Section] = {}
    for name, fields in group_by_section(values).items():
        try:
            sections[name] = SECTIONS[name](**fields)
        except pydantic.ValidationError as error:
            raise field_problem(error, section=name) from None
    return sections
