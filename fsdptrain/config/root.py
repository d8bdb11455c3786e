"""`Config`: all sections, validated, with derived values."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

from pydantic import BaseModel

from fsdptrain.config import checks
from fsdptrain.config.algorithm import AlgorithmConfig, SelectionConfig, ShapingConfig
from fsdptrain.config.data import DataConfig, EnvironmentConfig, RewardConfig, SftConfig
from fsdptrain.config.keys import all_keys, all_sections, build_sections, flatten
from fsdptrain.config.model import FsdpConfig, ModelConfig, OptimConfig, RefConfig
from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_OPTIONS, is_custom, preset_values
from fsdptrain.config.rollout import BatchConfig, RolloutConfig, SyncConfig
from fsdptrain.config.rules import Condition, Fact, NoEffectError, RankGroup
from fsdptrain.config.run import LaunchConfig, LogConfig, RunConfig
from fsdptrain.config.section import STRICT, Section

if TYPE_CHECKING:
    from fsdptrain.config.keywords import Keywords  # pyright: ignore[reportMissingModuleSource]  # keywords.pyi

S = TypeVar("S", bound=Section)


class Config(BaseModel):
    """Configuration of a run.

    `Config(**values)` accepts sections and flat keys. Values that are not given come from the algorithm's preset.
    Raises ConfigError, one line with the flag, for an unknown key, an invalid value or an invalid combination.
    """

    model_config = STRICT

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    shaping: ShapingConfig = ShapingConfig()
    selection: SelectionConfig = SelectionConfig()
    sft: SftConfig = SftConfig()
    optim: OptimConfig = OptimConfig()
    batch: BatchConfig = BatchConfig()
    fsdp: FsdpConfig = FsdpConfig()
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    ref: RefConfig = RefConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()
    optional: dict[str, Section] = {}
    """Sections of optional folders and plug-ins, by name. `section` returns one with its type."""

    def __init__(self, **values: "Unpack[Keywords]") -> None:
        flat = flatten(cast("Mapping[str, Any]", values))
        algorithm = flat.get("algorithm", AlgorithmConfig().algorithm)
        if flat.get("output_dir", "") == "":
            model = os.path.basename(os.path.abspath(str(flat.get("hf_checkpoint"))))
            flat["output_dir"] = f"runs/{model}-{algorithm}"
        preset = preset_values(algorithm, flat.get("loss"))
        sections = build_sections({**preset, **flat})
        core = {name: section for name, section in sections.items() if name in type(self).model_fields}
        others = [name for name in all_sections() if name not in type(self).model_fields]
        super().__init__(**core, optional={name: sections.get(name) or all_sections()[name]() for name in others})
        checks.check(self)

    @property
    def sections(self) -> Iterator[Section]:
        """All sections, core sections first."""
        return (self.named(name) for name in all_sections())

    def named(self, name: str) -> Section:
        return self.optional[name] if name in self.optional else getattr(self, name)

    def section(self, kind: type[S]) -> S:
        """Return the section of an optional folder or plug-in; its defaults if it is not installed."""
        section = self.optional.get(kind.NAME, kind())
        assert isinstance(section, kind), f"two sections are named {kind.NAME}"
        return section

    def value(self, flat: str) -> Any:
        """Return the value of an option by its flat key; None if it is not installed."""
        key = all_keys().get(flat)
        return None if key is None else key.value(self)

    def with_values(self, **values: Any) -> "Config":
        """Return a copy with other values, by flat key. Checks neither values nor combinations."""
        changes: dict[str, dict[str, Any]] = {}
        for flat, value in values.items():
            key = all_keys()[flat]
            changes.setdefault(key.section, {})[key.name] = value
        sections = {name: self.named(name).model_copy(update=fields) for name, fields in changes.items()}
        core = {name: section for name, section in sections.items() if name not in self.optional}
        optional = {name: sections.get(name, section) for name, section in self.optional.items()}
        return self.model_copy(update={**core, "optional": optional})

    # For the checks

    def is_set(self, flat: str) -> bool:
        """Whether the value of an option differs from the default and from the algorithm's preset."""
        preset = preset_values(self.algorithm.algorithm, self.algorithm.loss)
        return self.value(flat) != preset.get(flat, all_keys()[flat].default)

    @property
    def changed_values(self) -> dict[str, Any]:
        """The options whose values differ from the defaults and from the algorithm's preset, by flat key."""
        return {flat: self.value(flat) for flat in all_keys() if self.is_set(flat)}

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{flat}={value!r}' for flat, value in self.changed_values.items())})"

    __str__ = __repr__

    def without_effect(self, keys: Iterable[str], reason: str) -> Iterator[NoEffectError]:
        """Yield an error for each of `keys` (flat) that is set."""
        for flat in keys:
            if self.is_set(flat):
                yield NoEffectError(f"{all_keys()[flat].flag} has no effect {reason}", flat)

    def holds(self, condition: Condition | str) -> bool:
        condition = Condition.parse(condition) if isinstance(condition, str) else condition
        key = condition.key
        return condition.holds_for(getattr(self, key[1:]) if key.startswith("@") else self.value(key))

    def has(self, fact: Fact) -> bool:
        return any(map(self.holds, self._conditions_of(fact)))

    def _conditions_of(self, fact: Fact) -> list[str]:
        return [condition for section in self.sections for stated, condition in section.FACTS if stated is fact]

    # What the options of all sections add up to

    @property
    def rank_groups(self) -> list[RankGroup]:
        """Groups of ranks that share work, fastest-varying first."""
        groups, copies = list[RankGroup](), 1
        for flat, key in all_keys().items():
            for mark in key.marks(RankGroup):
                stride = copies if mark.shares_packs or mark.crosses_packs else 1
                groups.append(replace(mark, key=flat, size=key.value(self), stride=stride))
                copies *= groups[-1].size if mark.shares_packs else 1
        return groups

    def ranks_along(self, kind: str) -> int:
        """Return the size of the groups of ranks of a `kind` (tensor, context, experts, ...); 1 if there are none."""
        return prod(group.size for group in self.rank_groups if group.kind == kind)

    @property
    def pack_copies(self) -> int:
        """Number of neighboring processes that receive the same packs and share the work on them."""
        return prod(group.size for group in self.rank_groups if group.shares_packs)

    @property
    def max_tokens_per_pack(self) -> int:
        """Pack limit over all processes that share a pack. [tokens]"""
        return self.batch.max_tokens_per_gpu * prod(group.size for group in self.rank_groups if group.shares_tokens)

    @property
    def pack_budget(self) -> str:
        """Flags that determine `max_tokens_per_pack`, with their values."""
        groups = [group for group in self.rank_groups if group.shares_tokens and group.size > 1]
        factors = [f"{all_keys()[group.key].flag} {group.size}" for group in groups]
        return " x ".join([f"--max-tokens-per-gpu {self.batch.max_tokens_per_gpu}", *factors])

    @property
    def stores_reference(self) -> bool:
        """Whether there is a reference model with separate weights."""
        provided = self.has(Fact.FROZEN_WEIGHTS) and not self.has(Fact.START) and self.ref.load is None
        return self.needs_reference and not provided

    @property
    def trains_zero_advantage(self) -> str:
        """Return the option that requires computing samples with advantage 0, or "" if they are skipped."""
        loss = LOSS_OPTIONS.get(self.algorithm.loss)  # custom losses are unknown
        if loss is None or not loss.idle_at_zero_advantage:
            return f"--loss {self.algorithm.loss}"
        keys = self._conditions_of(Fact.ZERO_ADVANTAGE)
        return next((all_keys()[flat].shown(self) for flat in keys if self.holds(flat)), "")

    # Derived values

    @property
    def compute_dtype_name(self) -> Literal["bfloat16", "float16", "float32"]:
        """Compute dtype; before `resolve_dtype`, the default for accelerators."""
        if self.model.fp16:
            return "float16"
        return "bfloat16" if self.model.bf16 else "float32"

    @property
    def precision_fix(self) -> str:
        """The option against numbers that are not finite, for messages: `, compute with --no-bf16`."""
        fixes = {"float16": ", use --bf16 instead of --fp16", "bfloat16": ", compute with --no-bf16"}
        return fixes.get(self.compute_dtype_name, "")

    @property
    def samples_per_rollout(self) -> int:
        """Samples per rollout; with `--algorithm sft`, per optimizer step. [samples]"""
        if self.algorithm.algorithm == "sft":
            return self.batch.global_batch_size or self.rollout.batch_size
        return self.rollout.batch_size * self.algorithm.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout, over all its epochs."""
        per_epoch = self.samples_per_rollout // (self.batch.global_batch_size or self.samples_per_rollout)
        return per_epoch * self.batch.epochs_per_rollout

    @property
    def on_policy(self) -> bool:
        """Whether each rollout is one optimizer step, so the samples come from the policy being trained."""
        return self.steps_per_rollout == 1

    @property
    def scores_policy(self) -> bool:
        """Whether the trainer computes policy logprobs before the first update.

        That is if the policy changes within a rollout, and the loss compares with the old policy.
        """
        loss = self.algorithm.loss
        compares = is_custom(loss) or "use_rollout_logprobs" in LOSS_OPTIONS[loss].reads
        return compares and not self.on_policy and not self.algorithm.use_rollout_logprobs

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
        """Temperature of the trainer's logprobs: the rollout temperature; 1 in supervised training."""
        return 1.0 if self.algorithm.algorithm == "sft" else self.rollout.temperature

    @property
    def is_truncated(self) -> bool:
        """Whether sampling excludes some of the vocabulary."""
        return (self.rollout.top_p, self.rollout.top_k, self.rollout.min_p) != (1.0, None, 0.0)

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term in the loss of a run that trains."""
        return self.algorithm.kl_loss_coef > 0 and self.run.num_rollout > 0

    @property
    def total_optimizer_steps(self) -> int:
        return self.run.num_rollout * self.steps_per_rollout

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
        """Whether the run generates completions. Supervised runs do not, and evaluate by loss."""
        return self.algorithm.algorithm != "sft"
