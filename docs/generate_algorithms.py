"""Write docs/algorithms.md from the code's tables and docstrings: `python docs/generate_algorithms.py`.

A test checks that the page is up to date.
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
from fsdptrain.algo.kl import KL_ESTIMATORS, adapt_kl_coef
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.objective import off_policy_sequences
from fsdptrain.algo.shaping import length, overlong, without_truncated
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config import AlgorithmConfig, RefConfig
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import ADVANTAGE_SCALES, LOSS_OPTIONS, OLD_POLICY, PRESETS, Preset
from fsdptrain.features.moe import balance
from fsdptrain.features.moe.bias import RouterBiasUpdater
from fsdptrain.model import logprobs, truncation

PAGE = Path(__file__).parent / "algorithms.md"
LEARNING = Path(__file__).parents[1] / "benchmarks" / "results" / "algorithms.json"

WHEN = {  # when to use an algorithm
    "grpo": "The default: verifiable rewards, a few optimizer steps per rollout.",
    "dapo": "Long reasoning with falling entropy: a higher upper clip bound, a penalty "
    "on overlong responses, and dynamic sampling.",
    "dr_grpo": "Responses that get longer but not better: weights do not depend on length or difficulty.",
    "gspo": "Mixture-of-experts models and long responses, where ratios of single tokens are noisy. Use "
    "several optimizer steps per rollout.",
    "cispo": "When grpo clips rare but important tokens; several optimizer steps per rollout.",
    "sapo": "Off-policy training with a smooth gate instead of a clip.",
    "gmpo": "Outlier ratios of single tokens: their geometric mean is robust and allows a wider clip.",
    "dppo_tv": "Large vocabularies: a ratio clip is too strict for rare tokens and too loose for frequent ones.",
    "dppo_kl": "As dppo_tv, but stricter for tokens of probability near 1.",
    "prime_rl": "When engine and trainer differ, or samples are stale: needs no old logprobs.",
    "reinforce": "One optimizer step per rollout; nothing to tune.",
    "rloo": "As reinforce, with an unbiased baseline.",
    "reinforce++_baseline": "Few samples per prompt: advantages are scaled over the whole batch.",
    "max_rl": "Hard prompts that are rarely solved, with rewards of 0 and 1.",
    "opo": "Strictly on-policy, with responses of very different lengths.",
    "sft": "Supervised training on prompts and labels, without rollouts.",
}

HEAD = """\
# Algorithms

<!-- made by docs/generate_algorithms.py: change the docstrings in fsdptrain/algo and fsdptrain/config/presets.py -->

`--algorithm NAME` is a preset of loss, aggregation, advantage, the options of the loss and, for some algorithms,
options of other sections. Values in a recipe or a flag override the preset; `--dry-run` shows which values come from
it. If the flag `--algorithm` differs from the recipe's, its preset overrides these values of the recipe, so the
`config.yaml` of a run can be used with another algorithm. An option that the chosen loss does not read is an error.

Notation: the logprob of a token is l by the policy, lo by the old policy, lr by the engine, lf by the reference;
p = exp(l), r = exp(l - lo); A is the advantage of the sequence; sg stops the gradient; log ratios are clamped to +-20.
A group is the samples of one prompt, with rewards s.

| `--algorithm` | `--loss` | `--loss-aggregation` | `--advantage-estimator` | options | when to use it |
|---|---|---|---|---|---|
"""

LOSS_HEAD = """
## Losses

`--loss NAME`, or your own function: `--loss package.module:function`, with the arguments and the result of those in
`fsdptrain/algo/losses.py`. Every loss supports the KL and entropy terms. All except `prime_rl` and `sft` compare with
the old policy, and therefore support `--use-rollout-logprobs`, `--use-opsm` and the corrections below.
"""

KL_HEAD = """
kl_t is an estimate of KL(policy || reference) for one token, from its log ratio l - lf. Use it in the loss, in the
reward, or in both:

| place | effect | gradient | source |
|---|---|---|---|
"""

KL_PLACES = {
    "loss: `--kl-loss-coef`, `--kl-loss-type`": (
        "coef kl_t is added to the loss of each token, before aggregation",
        "yes: use k2 or k3",
        "GRPO, arXiv 2402.03300",
    ),
    "reward: `--kl-reward-coef`, `--kl-reward-type`": (
        "s - coef sum_t kl_t, before advantages, with lo instead of l",
        "no: k1 is unbiased",
        "Ziegler et al. 2019, arXiv 1909.08593",
    ),
}

KL_NOTES = """
KL in the reward is scaled like the reward: with an estimator that divides by the std of a group (`grpo`), a group of
equal rewards gets advantages from its KL alone, at full scale; with `dr_grpo`, `rloo` and `reinforce++_baseline` it
does not. `reward/mean` is without this term, `reward/kl` is the term, and `kl/reward_mean` the KL of a whole response
[nats].
"""

ADVANTAGE_HEAD = """
## Advantages: `--advantage-estimator`

An estimator compares the rewards of a group; a scale divides the result. The column `scale` shows the scale that
`--advantage-scale auto` selects; any other scale can be set.

| name | scale | |
|---|---|---|
"""

OWN_ESTIMATOR = """
Or your own function, `--advantage-estimator package.module:function`; its default scale is `none`:

```python
def median_baseline(rewards: list[float], lengths: list[int]) -> list[float]:
    \"\"\"Rewards and response lengths of the scored samples of a group. Returns one finite number per sample.\"\"\"
    middle = statistics.median(rewards)
    return [reward - middle for reward in rewards]
```
"""

SCALES = {"`group`": divide_by_group_std, "`batch`": divide_by_batch_std, "`whiten`": whiten_tokens}

MULTI_REWARD_NOTE = """
`--reward math=0.9 format=0.1` sets rewards s_k and their weights w_k. Each is logged under its name, without its
weight. A function that returns a mapping is one reward; its values are logged too. Use `normalize_then_sum` for rewards
of different scale or difficulty, and to distinguish samples with equal sums, such as (1, 0) and (0, 1). It is rejected
with a single reward, and with another scale than `group`.
"""

SHAPING_HEAD = """
## Shaping by length

Shaping changes rewards in training only, before advantages. The flag is a coefficient; coefficient times the value
below is added to the reward. The value is logged as `reward/overlong` or `reward/length`, and `reward/mean` is the
reward after shaping. T is the number of response tokens. Unscored samples are not shaped.

| flag | formula | default | when to use it |
|---|---|---|---|
"""

SHAPING = (
    (
        "overlong_penalty",
        overlong,
        "Long responses, where truncation adds noise to the reward. On in `--algorithm dapo`.",
    ),
    ("length_penalty", length, "Responses that are correct but too long. Use small values: 0.1 to 0.5."),
    ("mask_truncated", without_truncated, "If truncated responses may have become correct."),
)

SHAPING_NOTE = """
`--overlong-buffer` is by default a fifth of `--rollout-max-response-len`, as in DAPO (4096 of 20480 tokens). The best
run of DAPO used the penalty without filtering (notes to its recipe in verl), as `--algorithm dapo` does. Its rewards
were -1 and 1: with rewards 0 and 1 the same coefficient has twice the effect.
"""

CORRECTION_HEAD = """
## Mismatch corrections: `--mismatch-correction`

w_t = exp(lo - lr) is the ratio of a token's probability in the trainer to that in the engine. The weight has no
gradient and multiplies the policy's loss before aggregation; a token of weight 0 still counts in the denominator.
`--mismatch-low` and `--mismatch-high` set the bounds; `mismatch/out_of_bounds` is the share of tokens outside.

| name | weight | low, high | |
|---|---|---|---|
"""

LEARNING_HEAD = """
## Every algorithm learns

Held-out accuracy on the quickstart's task, spelling words backward, before and after {rollouts} rollouts of two
optimizer steps: means over {seeds} seeds, and the smallest and largest gain of a seed. Every algorithm ran with its
preset from the same warm start, with one learning rate that was not tuned for any of them: the table shows that all
learn, not which is best. (`rloo` is `reinforce` with advantages scaled by 8/7, to which Adam is invariant.)
Measured by `{command}` with torch {torch} and transformers {transformers} on a CPU; raw numbers and a picture are in
`benchmarks/results/algorithms.json` and next to it.

| `--algorithm` | sampled: before | after | gain | greedy: before | after |
|---|---|---|---|---|---|
"""

ELSEWHERE = """
## Differences from TRL

Differences from `GRPOTrainer` of TRL 1.16. Tests compare the other losses and advantages that both have with TRL's
functions.

| | here | TRL |
|---|---|---|
| bound of the ratio above the clip | `--eps-clip-c` bounds it where A < 0 (dual clip, arXiv 1912.09729) | `delta` bounds it for both signs: the same if it is at least 1 + `epsilon_high` |
| unbiased KL | off; `--use-unbiased-kl` multiplies by the ratio of the token, also with `gspo` | on; `use_bias_correction_kl` multiplies by the ratio of the loss, for sequences their geometric mean |
| masked correction of a sequence | `mis_sequence`: the geometric mean of w_t inside [0.99, 1.01] | `sequence_mask`: the product of w_t, at most 3 |
| off-policy sequence masking | drift from the old policy | drift from the engine, if vLLM generates |
| not available here | | `vespo`, `luspo`, `top_entropy_quantile`, the adaptive entropy coefficient |

`prime_rl` is the default loss of prime-rl, which uses the name `ipo` for another loss.
"""  # noqa: E501

REJECTION_HEAD = """
### Rejection: `--mismatch-rejection`

Works with any of these corrections. Tokens, or whole sequences, get weight 0 if an estimate of KL(engine || trainer)
exceeds `--mismatch-rejection-max` [nats]; they still count in the denominator. k_t is k1, k2 or k3 of the log ratio
lr - lo. `mismatch/rejected` is the share of rejected tokens. As in verl's rollout correction ("When Speed Kills
Stability", 2025), with one bound for all estimators: a bound u of the ratio is log(u) for k1. With
`--use-rollout-logprobs`, which uses lr as lo and computes no old logprobs, l replaces lo here and in `mismatch/*`.

| name | rejected if this exceeds the bound |
|---|---|
"""


def algorithms_page() -> str:
    """Return the text of docs/algorithms.md."""
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
    parts.append(f"\n`--kl-target`, after each rollout: {_flow(inspect.getdoc(adapt_kl_coef))}\n")
    renewed, dtype = (_flow(RefConfig.model_fields[name].description) for name in ("update_interval", "dtype"))
    parts.append(
        f"\n`--ref-update-interval`: {renewed} Checkpoints contain this reference.\n\n`--ref-dtype`: {dtype}\n"
    )
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
    parts.append(ELSEWHERE)
    parts.append(_truncation_part())
    parts.append(f"\n## Mixtures of experts: `--router-aux-loss-coef`\n\n{inspect.getdoc(balance)}\n")
    parts.append(
        f"\n## Balancing without a loss: `--router-bias-update-rate`\n\n{inspect.getdoc(RouterBiasUpdater)}\n\n"
    )
    parts.append(f"The direction of the update:\n{inspect.getdoc(balance.bias_change)}\n")
    parts.append(_learning_part(json.loads(LEARNING.read_text(encoding="utf-8"))))
    return "".join(parts)


def _truncation_part() -> str:
    """Build the section from the docstrings of the two modules that implement it."""
    order = _paragraphs(truncation)[1]
    filters = _paragraphs(truncation.smallest_kept)[1]
    label = _paragraphs(logprobs)[-1]
    return (
        "\n## Truncated sampling: `--rollout-top-p`, `--rollout-top-k`, `--rollout-min-p`\n\n"
        "The engine reports logprobs over the tokens K that it may sample. The trainer computes l, lo, lf and the "
        "entropy over the same tokens: l = z[label] - logsumexp_K(z). Evaluations sample from all "
        f"tokens.\n\n{order}\n\n{filters}\n\n{label}\n"
    )


def _paragraphs(documented: Any) -> list[str]:
    return [_flow(part) for part in (inspect.getdoc(documented) or "").split("\n\n")]


def _learning_part(result: Mapping[str, Any]) -> str:
    """Build the table of the results of benchmarks/algorithms.py."""
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
