"""Writes docs/algorithms.md from the code's tables and docstrings: `python docs/generate_algorithms.py`.

A test holds the page to what this makes.
"""

import inspect
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptrain.algo.advantages import ADVANTAGES, MULTI_REWARD, divide_by_group_std
from fsdptrain.algo.batch_scales import divide_by_batch_std, whiten_tokens
from fsdptrain.algo.corrections import CORRECTIONS, REJECTION_ESTIMATORS, REJECTION_LEVELS
from fsdptrain.algo.kl import KL_ESTIMATORS, adapted
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.objective import off_policy_sequences
from fsdptrain.algo.shaping import length, overlong, without_truncated
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config import AlgorithmConfig, RefConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_OPTIONS, OLD_POLICY, PRESETS, Preset
from fsdptrain.features.moe import balance
from fsdptrain.features.moe.bias_update import RouterBiasUpdater
from fsdptrain.model import logprobs, truncation

PAGE = Path(__file__).parent / "algorithms.md"
LEARNING = Path(__file__).parents[1] / "benchmarks" / "results" / "algorithms.json"

WHEN = {  # when to use an algorithm
    "grpo": "The default: verifiable rewards, a few optimizer steps on each rollout.",
    "dapo": "Long reasoning, where the entropy falls: room upwards for unlikely tokens, less reward for answers that "
    "come close to the limit, and new prompts in place of those that teach nothing.",
    "dr_grpo": "When answers grow long without growing right: neither length nor difficulty weights a sample.",
    "gspo": "Mixture-of-experts models and long answers, where ratios of single tokens are noise. Takes several "
    "optimizer steps on each rollout.",
    "cispo": "When rare but decisive tokens are clipped away by grpo; several steps on each rollout.",
    "sapo": "A gate without an edge: smoother than a clip off-policy.",
    "gmpo": "When single ratios are outliers: their geometric mean is not, and allows a wider clip.",
    "dppo_tv": "Large vocabularies: a ratio clip holds back rare tokens too much and frequent ones too little.",
    "dppo_kl": "As dppo_tv, stricter on tokens that were nearly certain.",
    "ipo": "When engine and trainer differ, or samples are older than a step: no old logprobs are scored at all.",
    "reinforce": "One optimizer step on each rollout, and nothing to tune.",
    "rloo": "As reinforce, with an unbiased baseline.",
    "reinforce++_baseline": "Few samples for each prompt: the scale of an advantage comes from the whole batch.",
    "max_rl": "Hard prompts that are rarely solved, with rewards of 0 and 1.",
    "opo": "Strictly on-policy, with answers of very different length.",
    "sft": "Supervised training on prompts and their labels, without rollouts.",
}

HEAD = """\
# Algorithms

<!-- made by docs/generate_algorithms.py: change the docstrings in fsdptrain/algo and fsdptrain/config/presets.py -->

`--algorithm NAME` is a preset of a loss, an aggregation, an advantage, the loss's own options and, where the algorithm
is more than a loss, options of other sections. What a recipe or a flag says of one of these wins over it, and
`--dry-run` shows which values came from the preset. But a flag that names another algorithm than the recipe wins over
what the recipe says of these: the written `config.yaml` of one run can be run with another algorithm. An option that
the chosen loss does not read is an error.

Notation: l the policy's logprob of a token, lo the old policy's, lr the engine's, lf the reference's; p = exp(l),
r = exp(l - lo); A the advantage of the sequence; sg stops the gradient; log ratios are clamped to +-20. A group is the
samples of one prompt, with rewards s.

| `--algorithm` | `--loss` | `--loss-aggregation` | `--advantage-estimator` | options | when to use it |
|---|---|---|---|---|---|
"""

LOSS_HEAD = """
## Losses

`--loss NAME`, or a function of your own: `--loss package.module:function`, with the arguments and the result of those
in `fsdptrain/algo/losses.py`. Every loss takes the KL and entropy terms too. All but `ipo` and `sft` compare with the
old policy, and so take `--use-rollout-logprobs`, `--use-opsm` and the corrections below.
"""

KL_HEAD = """
KL(policy || reference) of a token, kl_t, from its log ratio l - lf. It stands in the loss, in the reward, or in both:

| place | what is done | gradient | |
|---|---|---|---|
"""

KL_PLACES = {
    "loss: `--kl-loss-coef`, `--kl-loss-type`": (
        "coef kl_t is added to the loss of each token, before aggregation",
        "yes, so k2 or k3 is meant",
        "GRPO, arXiv 2402.03300",
    ),
    "reward: `--kl-reward-coef`, `--kl-reward-type`": (
        "s - coef sum_t kl_t, before advantages, with lo in place of l",
        "none, so k1 is unbiased",
        "Ziegler et al. 2019, arXiv 1909.08593",
    ),
}

KL_NOTES = """
In the reward it is scaled as the reward is: an estimator that divides by the std of a group (`grpo`) judges a group of
equal rewards by its KL alone, at full scale; `dr_grpo`, `rloo` and `reinforce++_baseline` do not. `reward/mean` stays
that of the task, `reward/kl` is what was added to it, `kl/reward_mean` the KL divergence of a whole response in nats.
"""

ADVANTAGE_HEAD = """
## Advantages: `--advantage-estimator`

An estimator compares the rewards of a group, and a scale divides what it found. The scale below is what
`--advantage-scale auto` means; any other can be chosen.

| name | scale | |
|---|---|---|
"""

OWN_ESTIMATOR = """
Or a function of your own, `--advantage-estimator package.module:function`, with the scale `none` unless you say more:

```python
def median_baseline(rewards: list[float], lengths: list[int]) -> list[float]:
    \"\"\"Of the scored samples of one group: reward and number of response tokens. One finite number for each.\"\"\"
    middle = statistics.median(rewards)
    return [reward - middle for reward in rewards]
```
"""

SCALES = {"`group`": divide_by_group_std, "`batch`": divide_by_batch_std, "`whiten`": whiten_tokens}

MULTI_REWARD_NOTE = """
`--reward math=0.9 format=0.1` names rewards s_k and their weights w_k. Each is logged by its name, without its weight;
a function that returns a mapping is one reward, and its values are logged too.
`normalize_then_sum` is refused with one reward, and where the scale is not `group`. It is for rewards that differ in
scale or difficulty, and keeps apart what a sum makes equal: (1, 0) and (0, 1).
"""

SHAPING_HEAD = """
## Shaping by length

Before advantages, in training only: evaluation sees the rewards as they are. A penalty is added to the reward, its
coefficient times the value below; the value is logged as `reward/overlong` or `reward/length`, and `reward/mean` is the
reward after shaping. T is the number of response tokens. An unscored sample is not shaped.

| flag | formula | default | when to use it |
|---|---|---|---|
"""

SHAPING = (
    ("overlong_penalty", overlong, "Long answers, where a cut-off is noise in the reward. On in `--algorithm dapo`."),
    ("length_penalty", length, "Answers that are right, and longer than they need to be. Small: 0.1 to 0.5."),
    ("mask_truncated", without_truncated, "When what was cut off may have been on its way to a right answer."),
)

SHAPING_NOTE = """
`--overlong-buffer` is a fifth of `--rollout-max-response-len` by default: DAPO has 4096 of 20480 tokens. The best run
of DAPO had the penalty and no filtering (so say the notes to its recipe in verl), and so has `--algorithm dapo`. Its
rewards were -1 and 1: with 0 and 1 the same coefficient weighs twice as much.
"""

CORRECTION_HEAD = """
## Mismatch corrections: `--mismatch-correction`

w_t = exp(lo - lr) of a token: how much likelier the trainer finds it than the engine that sampled it. The weight has no
gradient and multiplies the policy's loss before aggregation; a token of weight 0 still counts in the denominator.
`--mismatch-low` and `--mismatch-high` set the bounds, and `mismatch/out_of_bounds` counts by them.

| name | weight | low, high | |
|---|---|---|---|
"""

LEARNING_HEAD = """
## Each of them learns

Held-out accuracy on the task of the quickstart, spelling words backward, before and after {rollouts} rollouts of two
optimizer steps: means over {seeds} seeds, and the least and the largest gain of a seed. Every algorithm ran as its
preset says, from the same warm start, at one learning rate that was tuned for none of them; so the table says that each
one learns, not which one is best (`rloo` is `reinforce` with advantages 8/7 as large, which Adam does not see). Made by
`{command}` with torch {torch} and transformers {transformers} on a CPU; raw numbers in
`benchmarks/results/algorithms.json`, a picture beside it.

| `--algorithm` | sampled: before | after | gain | greedy: before | after |
|---|---|---|---|---|---|
"""

REJECTION_HEAD = """
### Rejection: `--mismatch-rejection`, beside any of these weights

Tokens, or whole sequences, get weight 0 where an estimate of KL(engine || trainer) is above `--mismatch-rejection-max`
[nats]; they still count in the denominator. k_t is k1, k2 or k3 of the log ratio lr - lo. `mismatch/rejected` is the
share of tokens. As in verl's rollout correction ("When Speed Kills Stability", 2025), with one bound for all: a bound u
of the ratio itself is log(u) of k1. With `--use-rollout-logprobs`, which takes lr for lo and scores no old policy, l
stands in the place of lo here and in `mismatch/*`.

| name | dropped where this is above the bound |
|---|---|
"""


def algorithms_page() -> str:
    """docs/algorithms.md."""
    parts = [HEAD, *(_preset_row(name, preset) for name, preset in PRESETS.items()), LOSS_HEAD]
    parts += [_loss_part(name) for name in LOSSES]
    parts.append(_section("Off-policy sequence masking: `--use-opsm`", {"`use_opsm`": off_policy_sequences}))
    parts += [ADVANTAGE_HEAD, *(_estimator_row(name) for name in ADVANTAGES), OWN_ESTIMATOR]
    parts.append(_section("Scale of advantages: `--advantage-scale`", SCALES))
    parts.append("| `none` | Nothing. |\n")
    parts.append(_section("Several rewards: `--multi-reward`", {f"`{k}`": v for k, v in MULTI_REWARD.items()}))
    parts += [MULTI_REWARD_NOTE, SHAPING_HEAD, *(_shaping_row(*row) for row in SHAPING), SHAPING_NOTE]
    parts.append(_section("Aggregation: `--loss-aggregation`", {f"`{k}`": v for k, v in AGGREGATIONS.items()}))
    estimators = {f"`{k}`": v for k, v in KL_ESTIMATORS.items()}
    parts.append(_section("KL to the reference: `--kl-loss-type`, `--kl-reward-type`", estimators))
    parts.append(KL_HEAD)
    parts += [f"| {place} | {' | '.join(cells)} |\n" for place, cells in KL_PLACES.items()]
    parts += [KL_NOTES, f"\n`--use-unbiased-kl`, in the loss: {_help('use_unbiased_kl')}\n"]
    parts.append(f"\n`--kl-target`, after each rollout: {_flow(inspect.getdoc(adapted))}\n")
    renewed = _flow(RefConfig.model_fields["update_interval"].description)
    parts.append(f"\n`--ref-update-interval`: {renewed} A checkpoint holds such a reference.\n")
    parts.append(CORRECTION_HEAD)
    parts += [
        f"| `{name}` | {_cell(c.formula)} | {c.low:g}, {c.high:g} | {_cell(c.source)} |\n"
        for name, c in CORRECTIONS.items()
    ]
    parts.append(REJECTION_HEAD)
    parts += [
        f"| {', '.join(f'`{name}_{estimator}`' for estimator in REJECTION_ESTIMATORS)} | {level.formula} |\n"
        for name, level in REJECTION_LEVELS.items()
    ]
    parts.append(_truncation_part())
    parts.append(f"\n## Mixtures of experts: `--router-aux-loss-coef`\n\n{inspect.getdoc(balance)}\n")
    parts.append(f"\n## Without a loss: `--router-bias-update-rate`\n\n{inspect.getdoc(RouterBiasUpdater)}\n\n")
    parts.append(f"The direction:\n{inspect.getdoc(balance.bias_change)}\n")
    parts.append(_learning_part(json.loads(LEARNING.read_text(encoding="utf-8"))))
    return "".join(parts)


def _truncation_part() -> str:
    """From the docstrings of the two modules that do it."""
    order = _paragraphs(truncation)[1]
    filters = _paragraphs(truncation.smallest_kept)[1]
    label = _paragraphs(logprobs)[-1]
    return (
        "\n## Truncated sampling: `--rollout-top-p`, `--rollout-top-k`, `--rollout-min-p`\n\n"
        "The engine reports logprobs among the tokens that it sampled from, K, and the trainer scores l, lo and lf "
        "among the same: l = z[label] - logsumexp_K(z), and the entropy is that over K. Evaluations sample from all "
        f"tokens.\n\n{order}\n\n{filters}\n\n{label}\n"
    )


def _paragraphs(documented: Any) -> list[str]:
    return [_flow(part) for part in (inspect.getdoc(documented) or "").split("\n\n")]


def _learning_part(result: Mapping[str, Any]) -> str:
    """What benchmarks/algorithms.py has measured."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["algorithm"], []).append(run)
    versions = result.get("versions", {})  # beside the rest in a file from before the common header
    head = LEARNING_HEAD.format(**{**result, **versions}, seeds=len({run["seed"] for run in result["runs"]}))
    return head + "".join(_learning_row(name, runs[name]) for name in PRESETS if name in runs)


def _learning_row(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    def mean(key: str) -> str:
        return f"{statistics.mean(run[key] for run in runs):.3f}"

    gains = [run["after"] - run["before"] for run in runs]
    cells = [mean("before"), mean("after"), f"{min(gains):+.3f} to {max(gains):+.3f}"]
    return f"| `{name}` | {' | '.join([*cells, mean('greedy_before'), mean('greedy_after')])} |\n"


def _preset_row(name: str, preset: Preset) -> str:
    advantage = "none" if name == "sft" else f"`{preset.advantage_estimator}`"
    values = {**LOSS_OPTIONS[preset.loss].defaults, **preset.options, **preset.beside}
    cells = [f"`{name}`", f"`{preset.loss}`", f"`{preset.loss_aggregation}`", advantage, _options(values), WHEN[name]]
    return f"| {' | '.join(cells)} |\n"


def _estimator_row(name: str) -> str:
    return f"| `{name}` | `{ADVANTAGE_SCALES[name]}` | {_cell(_flow(inspect.getdoc(ADVANTAGES[name])))} |\n"


def _shaping_row(key: str, function: Callable[..., Any], when: str) -> str:
    default = all_keys()[key].default
    shown = f"{default:g}" if isinstance(default, float) and default else "off"
    return f"| `{all_keys()[key].flag}` | {_cell(_flow(inspect.getdoc(function)))} | {shown} | {when} |\n"


def _loss_part(name: str) -> str:
    options = LOSS_OPTIONS[name]
    own = sorted(options.reads - OLD_POLICY)
    defaults = {field: options.defaults.get(field, _default(field)) for field in own}
    read = f"\nOptions: {_options(defaults)}.\n" if own else ""
    return f"\n### `{name}`\n\n{inspect.getdoc(LOSSES[name])}\n{read}"


def _section(title: str, functions: Mapping[str, Callable[..., Any]]) -> str:
    rows = [f"| {name} | {_cell(_flow(inspect.getdoc(function)))} |\n" for name, function in functions.items()]
    return f"\n## {title}\n\n| name | |\n|---|---|\n{''.join(rows)}"


def _default(field: str) -> Any:
    return AlgorithmConfig.model_fields[field].get_default()


def _help(field: str) -> str:
    return _flow(AlgorithmConfig.model_fields[field].description)


def _options(values: Mapping[str, Any]) -> str:
    shown = {field: "off" if field == "eps_clip_c" else "as eps_clip" for field, v in values.items() if v is None}
    return ", ".join(f"`{field}` {shown.get(field, value)}" for field, value in values.items())


def _flow(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(algorithms_page(), encoding="utf-8")
