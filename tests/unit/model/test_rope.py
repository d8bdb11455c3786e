"""The longest possible sequence is compared with the rotary embedding before a model is loaded."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.model.attention.rope import check_longest, rope_switch
from tests import zoo

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0} | {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def test_only_length_dependent_frequencies_have_a_switch() -> None:
    assert rope_switch(zoo.config("llama")) is None
    assert rope_switch(zoo.config("gemma3")) is None  # two kinds of layers
    longrope = zoo.config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    assert rope_switch(longrope) == (64, "longrope")
    dynamic = zoo.config("llama", rope_parameters=DYNAMIC, max_position_embeddings=128)
    assert rope_switch(dynamic) == (128, "dynamic")


@pytest.mark.parametrize(
    ("fits", "options"),
    [
        (True, {"rollout_max_prompt_len": 16, "rollout_max_response_len": 48}),
        (True, {"max_tokens_per_gpu": 64, "rollout_max_response_len": 32}),
        (True, {"algorithm": "sft", "max_tokens_per_gpu": 64, "eval_interval": 0}),
        (False, {"rollout_max_prompt_len": 17, "rollout_max_response_len": 48}),
        (False, {"rollout_max_response_len": 32}),
        (False, {"algorithm": "sft", "rollout_max_prompt_len": 16, "eval_interval": 0}),
    ],
)
def test_a_run_beyond_the_switch_is_refused_with_the_flags(fits, options):
    model_config = zoo.config("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    longest = Config(hf_checkpoint="x", **options).longest_sequence
    if fits:
        check_longest(model_config, longest)
        return
    with pytest.raises(ConfigError, match=rf"beyond 64 tokens .*may have {longest}: .*--max-tokens-per-gpu 64"):
        check_longest(model_config, longest)
