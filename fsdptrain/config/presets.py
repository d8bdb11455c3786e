"""Presets of `--algorithm NAME` and `--loss NAME`, as data for checks, value sources and docs.

An algorithm is a preset of loss, aggregation, advantage, loss options, and options of other sections. Recipes and flags
override it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RATIO = frozenset({"use_rollout_logprobs", "use_opsm", "opsm_delta"})  # read by every loss with an old policy
OLD_POLICY = RATIO | {"mismatch_correction", "mismatch_low", "mismatch_high"}
CLIP = frozenset({"eps_clip", "eps_clip_high"})


@dataclass(frozen=True)
class LossOptions:
    """Options of the section `algorithm` that a loss reads. All losses also read the KL and entropy options."""

    reads: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they differ from the section's defaults
    idle_on_policy: frozenset[str] = frozenset()  # options without effect if the policy ratio is always 1
    idle_at_zero_advantage: bool = False  # a sample with advantage 0 adds 0 to the loss and to the gradient


@dataclass(frozen=True)
class Preset:
    """Components of an algorithm."""

    loss: str
    loss_aggregation: str = "token_mean"
    advantage_estimator: str = "grpo"
    options: Mapping[str, Any] = field(default_factory=dict)  # loss options; override the defaults of the loss
    beside: Mapping[str, Any] = field(default_factory=dict)  # flat key -> value, in any section, for any loss


def _loss(*names: str, **defaults: Any) -> LossOptions:
    """Describe a loss with an old policy that also reads `names` and is a multiple of the advantage."""
    reads = frozenset(names)
    idle = reads | {"use_opsm", "opsm_delta"}
    return LossOptions(OLD_POLICY | reads, defaults, idle_on_policy=idle, idle_at_zero_advantage=True)


LOSS_OPTIONS: Mapping[str, LossOptions] = {
    "grpo": _loss(*CLIP, "eps_clip_c"),
    "gspo": _loss(*CLIP, "eps_clip_c", eps_clip=3e-4, eps_clip_high=4e-4),
    "cispo": _loss("is_cap_high"),
    "sapo": _loss("sapo_tau_pos", "sapo_tau_neg"),
    "prime_rl": LossOptions(CLIP),
    "reinforce": _loss(),
    "sft": LossOptions(frozenset()),
}
ADVANTAGE_SCALES: Mapping[str, str] = {  # meaning of `--advantage-scale auto`
    "grpo": "group",
    "dr_grpo": "none",
    "rloo": "none",
    "reinforce++_baseline": "whiten",
    "none": "none",
}
MISMATCH_BOUNDS: Mapping[str, tuple[float, float]] = {  # correction -> defaults of --mismatch-low and -high
    "none": (0.5, 2.0),
    "tis": (0.0, 2.0),
    "tis_sequence": (0.0, 2.0),
    "mis": (0.5, 2.0),
    "mis_sequence": (0.99, 1.01),
    "icepop": (0.5, 5.0),
}
LOSS_FIELDS = tuple(sorted(frozenset().union(*(options.reads for options in LOSS_OPTIONS.values()))))

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset("grpo", options={"kl_loss_coef": 0.001}),  # as published; the coefficient is that of verl's examples
    "dapo": Preset("grpo", options={"eps_clip_high": 0.28}, beside={"dynamic_sampling": True, "overlong_penalty": 1.0}),
    "dr_grpo": Preset("grpo", loss_aggregation="fixed_length", advantage_estimator="dr_grpo"),
    "gspo": Preset("gspo", loss_aggregation="sequence_mean"),
    "cispo": Preset("cispo"),
    "sapo": Preset("sapo", loss_aggregation="sequence_mean"),
    "prime_rl": Preset("prime_rl", advantage_estimator="dr_grpo"),
    "reinforce": Preset("reinforce", advantage_estimator="dr_grpo"),
    "rloo": Preset("reinforce", advantage_estimator="rloo"),
    "reinforce++_baseline": Preset("grpo", advantage_estimator="reinforce++_baseline"),
    "opd": Preset("grpo", advantage_estimator="none"),
    "sft": Preset("sft"),
}


def preset_values(algorithm: object, loss: object) -> dict[str, Any]:
    """Return the values that `--algorithm` and `--loss` (None: not given) set, by flat key.

    A loss other than the preset's sets its own defaults. Unknown names set nothing; they are rejected elsewhere.
    """
    preset = PRESETS.get(algorithm) if isinstance(algorithm, str) else None
    if preset is None:
        return {}
    chosen = preset.loss if loss is None else loss
    options = LOSS_OPTIONS.get(chosen) if isinstance(chosen, str) else None
    return {
        "loss": preset.loss,
        "loss_aggregation": preset.loss_aggregation,
        "advantage_estimator": preset.advantage_estimator,
        **preset.beside,
        **(options.defaults if options else {}),
        **(preset.options if chosen == preset.loss else {}),
    }


def is_custom(name: str) -> bool:
    """Return whether `name` is a custom `package.module:function`."""
    return ":" in name
