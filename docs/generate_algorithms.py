"""Writes docs/algorithms.md from the code's tables and docstrings: `python docs/generate_algorithms.py`.

A test holds the page to what this makes.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdptrain.algo import balance
from fsdptrain.algo.advantages import ADVANTAGES, whiten
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.objective import off_policy_sequences
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config import AlgorithmConfig
from fsdptrain.config.presets import LOSS_OPTIONS, OLD_POLICY, PRESETS, Preset

PAGE = Path(__file__).parent / "algorithms.md"

HEAD = """\
# Algorithms

<!-- made by docs/generate_algorithms.py: change the docstrings in fsdptrain/algo and fsdptrain/config/presets.py -->

`--algorithm NAME` is a preset of a loss, an aggregation, an advantage, the loss's own options and, where the algorithm
is more than a loss, options of other sections. What a recipe or a flag says of one of these wins over it, and
`--dry-run` shows which values came from the preset. An option that the chosen loss does not read is an error.

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

CORRECTION_HEAD = """
## Mismatch corrections: `--mismatch-correction`

w_t = exp(lo - lr) of a token: how much likelier the trainer finds it than the engine that sampled it. The weight has no
gradient and multiplies the policy's loss before aggregation; a token of weight 0 still counts in the denominator.
`--mismatch-low` and `--mismatch-high` set the bounds, and `mismatch/out_of_bounds` counts by them.

| name | weight | low, high | |
|---|---|---|---|
"""


def algorithms_page() -> str:
    """docs/algorithms.md."""
    parts = [HEAD, *(_preset_row(name, preset) for name, preset in PRESETS.items()), LOSS_HEAD]
    parts += [_loss_part(name) for name in LOSSES]
    parts.append(_section("Off-policy sequence masking: `--use-opsm`", {"`use_opsm`": off_policy_sequences}))
    estimates = {f"`{name}`": advantage.estimate for name, advantage in ADVANTAGES.items()}
    whitened = ", ".join(f"`{name}`" for name, advantage in ADVANTAGES.items() if advantage.whitened)
    parts.append(_section("Advantages: `--advantage-estimator`", estimates))
    parts.append(f"\nThen, for {whitened}: {(inspect.getdoc(whiten) or '').splitlines()[0]}\n")
    parts.append(_section("Aggregation: `--loss-aggregation`", {f"`{k}`": v for k, v in AGGREGATIONS.items()}))
    parts.append(_section("KL to the reference: `--kl-loss-type`", {f"`{k}`": v for k, v in KL_ESTIMATORS.items()}))
    parts.append(f"\n`--use-unbiased-kl`: {_help('use_unbiased_kl')}\n")
    parts.append(CORRECTION_HEAD)
    parts += [
        f"| `{name}` | {_cell(c.formula)} | {c.low:g}, {c.high:g} | {_cell(c.source)} |\n"
        for name, c in CORRECTIONS.items()
    ]
    parts.append(f"\n## Mixtures of experts: `--router-aux-loss-coef`\n\n{inspect.getdoc(balance)}\n")
    return "".join(parts)


def _preset_row(name: str, preset: Preset) -> str:
    advantage = "none" if name == "sft" else f"`{preset.advantage_estimator}`"
    values = {**LOSS_OPTIONS[preset.loss].defaults, **preset.options, **preset.beside}
    cells = [f"`{name}`", f"`{preset.loss}`", f"`{preset.loss_aggregation}`", advantage, _options(values), preset.when]
    return f"| {' | '.join(cells)} |\n"


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
