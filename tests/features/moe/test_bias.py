"""Models whose experts are balanced by a bias of the choice only, checked on small copies."""

import pytest
import torch

from fsdptrain.config.rules import NoEffectError
from fsdptrain.errors import ConfigError
from fsdptrain.features.moe.bias import bias_refusal, check_bias, choice_biases
from fsdptrain.model.probes.random_copy import random_copy
from tests import families, zoo

BALANCED = (
    "dots1 exaone_moe glm4_moe hy_v3 kolibri1 mimo_v2_flash minimax_m2 minimax_m3_vl_text solar_open axk1 axk2 "
    "deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite hy_v4 inkling_text inkling2_text bailing_hybrid kimi_linear "
    "nemotron_h lfm2_moe"
)


@pytest.mark.parametrize("name", BALANCED.split())
def test_families_with_such_a_bias_are_accepted(name):
    check_bias(families.config(name))


REFUSED = {
    "afmoe": "is a parameter, rounded to the dtype of the others",
    "laguna": "is a parameter",
    "ernie4_5_moe": "is a parameter",
    "longcat_flash": "is not the one bias of a decoder layer with a number for each expert",
    "zaya": "is not the one bias",
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_with_another_bias_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=REFUSED[name]) as raised:
        check_bias(families.config(name))
    assert str(raised.value).startswith(
        f"--router-bias-update-rate does not work with {families.config(name).model_type}"
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_model_without_such_a_bias_is_refused(name):
    with pytest.raises(NoEffectError, match="--router-bias-update-rate has no effect on"):
        check_bias(zoo.config(name))


def wrong_sign(gate):
    stock = gate.forward

    def forward(hidden_states):
        bias = gate.e_score_correction_bias
        bias.neg_()
        try:
            return stock(hidden_states)
        finally:
            bias.neg_()

    return forward


def into_the_weights(gate):
    stock = gate.forward

    def forward(hidden_states):
        logits, weights, experts = stock(hidden_states)
        return logits, weights + gate.e_score_correction_bias[experts], experts

    return forward


@pytest.mark.parametrize(("change", "words"), [(wrong_sign, "is not chosen"), (into_the_weights, "moves the weights")])
def test_a_bias_with_another_effect_is_found(change, words):
    model = random_copy(zoo.config("deepseek_v3"))
    assert len(choice_biases(model)) == 1
    gate = model.model.layers[1].mlp.gate
    with torch.no_grad():
        gate.forward = change(gate)
    assert words in bias_refusal(model)
