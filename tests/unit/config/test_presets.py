"""An algorithm is a preset: consistent by itself, weaker than a recipe or a flag, and visible."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from fsdptrain.algo.advantages import ADVANTAGES
from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.config import AlgorithmConfig, Config, resolve, to_yaml
from fsdptrain.config.presets import (
    ADVANTAGE_SCALES,
    LOSS_FIELDS,
    LOSS_OPTIONS,
    MISMATCH_BOUNDS,
    PRESETS,
    preset_values,
)
from fsdptrain.config.recipe import load_recipe

MODEL = ["--hf-checkpoint", "x"]


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("algorithm", PRESETS),
        ("loss_aggregation", AGGREGATIONS),
        ("kl_loss_type", KL_ESTIMATORS),
        ("mismatch_correction", CORRECTIONS),
    ],
)
def test_the_command_line_offers_what_the_tables_hold(field, table):
    assert set(get_args(AlgorithmConfig.model_fields[field].annotation)) == set(table)


def test_every_estimator_has_a_scale_and_is_offered():
    assert set(ADVANTAGE_SCALES) == set(ADVANTAGES)
    assert all(f"`{name}`" in AlgorithmConfig.model_fields["advantage_estimator"].description for name in ADVANTAGES)
    scales = get_args(AlgorithmConfig.model_fields["advantage_scale"].annotation)
    assert set(ADVANTAGE_SCALES.values()) | {"auto", "batch"} == set(scales)
    config = Config(hf_checkpoint="x", advantage_estimator="rloo", advantage_scale="batch")
    assert config.advantage_scale == "batch"
    assert Config(hf_checkpoint="x", advantage_estimator="a.b:c").advantage_scale == "none"


def test_every_loss_says_what_it_reads():
    assert set(LOSS_OPTIONS) == set(LOSSES)
    assert {preset.loss for preset in PRESETS.values()} == set(LOSSES)
    assert all(name in AlgorithmConfig.model_fields["loss"].description for name in LOSSES)
    assert set(LOSS_FIELDS) <= set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("off_policy", [False, True])
def test_every_algorithm_is_a_configuration_that_can_be_written_and_read(name, off_policy, tmp_path):
    batch = ["--global-batch-size", "64"] if off_policy and name != "sft" else []
    batch += ["--opd-teacher", "y"] if name == "opd" else []
    resolved = resolve([*MODEL, "--algorithm", name, *batch])
    algorithm, preset = resolved.config.algorithm, PRESETS[name]
    for option in ("loss", "loss_aggregation", "advantage_estimator"):
        assert getattr(algorithm, option) == getattr(preset, option)
    read = LOSS_OPTIONS[preset.loss].reads | {"kl_loss_coef"}
    assert set(preset.options) | set(LOSS_OPTIONS[preset.loss].defaults) <= read
    (tmp_path / "r.yaml").write_text(to_yaml(resolved.config, resolved.sources))
    assert load_recipe(tmp_path / "r.yaml") == resolved.config


def test_defaults_of_the_section_are_the_preset_of_the_default_algorithm():
    assert Config(hf_checkpoint="x").algorithm == AlgorithmConfig(kl_loss_coef=0.001)


def test_only_grpo_as_published_has_a_reference():
    assert [name for name in PRESETS if "kl_loss_coef" in preset_values(name, None)] == ["grpo"]
    assert "kl_loss_coef" not in preset_values("grpo", "a.b:c")


def test_a_flag_wins_over_a_recipe_a_recipe_over_the_preset_and_that_over_the_default(tmp_path: Path):
    recipe = tmp_path / "r.yaml"
    text = "hf_checkpoint: x\nalgorithm: gspo\nglobal_batch_size: 64\nloss_aggregation: token_mean\n"
    recipe.write_text(f"{text}optim:\n  lr: 1e-6\n  adam_beta1: 0.8\nbf16: false\n")
    resolved = resolve(["--recipe", str(recipe), "--eps-clip", "0.01", "--lr", "3e-6", "--bf16"])
    algorithm, optim, sources = resolved.config.algorithm, resolved.config.optim, resolved.sources
    assert (algorithm.loss, algorithm.eps_clip, algorithm.eps_clip_high) == ("gspo", 0.01, 4e-4)
    assert algorithm.loss_aggregation == "token_mean"
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2) == (3e-6, 0.8, 0.95)
    assert resolved.config.model.bf16
    assert {key for key, source in sources.items() if source == "flag"} == {"eps_clip", "lr", "bf16"}
    assert {key for key, source in sources.items() if source == "recipe"} == {
        "hf_checkpoint", "algorithm", "global_batch_size", "loss_aggregation", "adam_beta1",
    }  # fmt: skip
    assert (sources["loss"], sources["eps_clip_high"], sources["adam_beta2"]) == ("preset", "preset", "default")
    assert "eps_clip_high: 0.0004" in to_yaml(resolved.config, sources)


def test_a_preset_may_speak_of_any_section(tmp_path):
    """Its values are weaker than a recipe that names the algorithm, and are shown as the preset's."""
    resolved = resolve([*MODEL, "--algorithm", "dapo", "--loss", "gspo", "--overlong-buffer", "4"])
    assert (resolved.config.shaping.overlong_penalty, resolved.config.overlong_buffer) == (1.0, 4)
    assert [resolved.sources[key] for key in ("overlong_penalty", "overlong_buffer")] == ["preset", "flag"]
    (tmp_path / "r.yaml").write_text("hf_checkpoint: x\nalgorithm: dapo\nshaping: {overlong_penalty: 0.5}\n")
    resolved = resolve(["--recipe", str(tmp_path / "r.yaml"), "--loss", "gspo"])
    assert (resolved.config.shaping.overlong_penalty, resolved.sources["overlong_penalty"]) == (0.5, "recipe")
    assert Config(hf_checkpoint="x").shaping.overlong_penalty == 0.0


def test_what_a_preset_says_is_no_choice_of_the_users(monkeypatch):
    """So nobody is told that it has no effect."""
    dapo = replace(PRESETS["dapo"], beside={"overlong_buffer": 4})  # without its penalty
    monkeypatch.setitem(PRESETS, "dapo", dapo)  # type: ignore[arg-type]
    assert Config(hf_checkpoint="x", algorithm="dapo").overlong_buffer == 4


def test_the_overlong_buffer_is_a_fifth_of_the_longest_response():
    assert Config(hf_checkpoint="x", rollout_max_response_len=20480, max_tokens_per_gpu=30000).overlong_buffer == 4096
    assert Config(hf_checkpoint="x", rollout_max_response_len=3).overlong_buffer == 1


def test_another_loss_brings_its_own_clip():
    config = resolve([*MODEL, "--algorithm", "dapo", "--loss", "gspo"]).config
    assert (config.algorithm.eps_clip, config.algorithm.eps_clip_high) == (3e-4, 4e-4)
    own = resolve([*MODEL, "--algorithm", "gspo", "--loss", "a.b:c"])
    assert own.config.algorithm.eps_clip == 0.2
    assert own.sources["eps_clip"] == "default"


def test_bounds_of_a_correction_are_those_of_its_kind():
    assert set(MISMATCH_BOUNDS) == set(CORRECTIONS)
    for kind, (low, high) in MISMATCH_BOUNDS.items():
        assert AlgorithmConfig(mismatch_correction=kind).mismatch_bounds == (low, high)
        assert low <= 1 <= high
    assert AlgorithmConfig(mismatch_correction="mis", mismatch_low=0.0, mismatch_high=9.0).mismatch_bounds == (0.0, 9.0)


def test_the_upper_clip_follows_the_lower_one():
    assert AlgorithmConfig(eps_clip=0.4).clip_high == 0.4
    assert AlgorithmConfig(eps_clip=0.4, eps_clip_high=0.3).clip_high == 0.3


@pytest.mark.parametrize(
    ("name", "needed"), [("grpo", True), ("reinforce", True), ("prime_rl", False), ("cispo", True), ("sft", False)]
)
def test_old_logprobs_are_scored_only_where_they_are_used(name, needed):
    size = {} if name == "sft" else {"global_batch_size": 64}
    assert Config(hf_checkpoint="x", algorithm=name, **size).scores_policy is needed
    assert not Config(hf_checkpoint="x", algorithm=name).scores_policy
