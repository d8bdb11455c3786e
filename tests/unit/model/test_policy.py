"""The forward pass over packs has the logprobs and gradients of the stock model on each sequence alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.errors import NumericsError
from fsdptrain.model import policy
from fsdptrain.model.policy import head_transform, policy_logprobs
from fsdptrain.model.probes.head import check_backward, check_head
from fsdptrain.model.rows import Layout
from tests import zoo
from tests.exact import Exact, in_float64
from tests.matrix import only
from tests.seam import CPU, gradients, policy_model, random_pack

LENGTHS = (37, 5, 50, 21, 1)  # longer and shorter than the zoo's window of 16
LAYOUTS: tuple[Layout, ...] = ("packed", "padded")
NOT_PACKED = {"qwen3_next"}  # its recurrent mixers without kernels: test_layout
TEMPERATURE = 0.6
OPTIONS: dict[str, Any] = {"vocab_size": zoo.VOCAB_SIZE, "compute_dtype": torch.float32, "device": CPU}


def weights(values: Tensor) -> Tensor:
    """A gradient that differs from token to token."""
    return torch.linspace(-1.0, 2.0, values.numel())


def stock_one_by_one(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logprobs [T] (0 at the end of a segment), entropy [T], gradients: the untouched model with its own attention."""
    model = in_float64(zoo.build(name))
    model.set_attn_implementation("eager")
    values, entropies = [], []
    with Exact():
        for ids in random_pack(LENGTHS).input_ids.split(LENGTHS):
            ids = ids[None]
            logp = (model(input_ids=ids, use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            end = torch.zeros(1)
            values.append(torch.cat([logp.gather(1, ids[0, 1:, None])[:, 0], end]))
            entropies.append(torch.cat([-(logp.exp() * logp).sum(-1), end]))
        joined, entropy = torch.cat(values), torch.cat(entropies)
        found = gradients(model, (weights(joined) * (joined + 0.5 * entropy)).sum())
    return joined.detach(), entropy.detach(), found


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_both_layouts_are_exact_for_every_architecture(name: str) -> None:
    wanted, wanted_entropy, wanted_gradients = stock_one_by_one(name)
    largest = max(gradient.abs().max().item() for gradient in wanted_gradients.values())
    model = in_float64(policy_model(name))
    for layout in LAYOUTS:
        if layout == "packed" and name in NOT_PACKED:
            continue
        with Exact():
            batch = random_pack(LENGTHS)
            found = policy_logprobs(model, batch, layout=layout, temperature=TEMPERATURE, with_entropy=True)
            assert found.entropy is not None
            some = batch.loss_positions[::3]
            fewer = replace(batch, loss_positions=some, loss_places=some.numpy())
            scored = policy_logprobs(model, fewer, layout=layout, temperature=TEMPERATURE).values
            head_error = check_head(model, layout=layout, **OPTIONS)
            found_gradients = gradients(model, (weights(wanted) * (found.values + 0.5 * found.entropy)).sum())
        assert head_error < 1e-11
        torch.testing.assert_close(scored[some], found.values[some], rtol=0, atol=1e-11)
        assert scored.count_nonzero() == len(some)
        torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-11)
        torch.testing.assert_close(found.entropy, wanted_entropy, rtol=0, atol=1e-11)
        assert found_gradients.keys() == wanted_gradients.keys()
        for key, gradient in wanted_gradients.items():
            difference = (found_gradients[key] - gradient).abs().max().item()
            assert difference <= 1e-11 * largest, f"{layout} {key}"


@pytest.mark.parametrize(
    ("name", "change"),
    [("granite", {"_SCALE_KEYS": {}}), ("cohere", {"_SCALE_KEYS": {}}), ("gemma2", {"_SOFTCAP_KEYS": ()})],
)
def test_an_unknown_change_of_the_logits_stops_the_run(name, change, monkeypatch):
    for attribute, value in change.items():
        monkeypatch.setattr(policy, attribute, value)
    with pytest.raises(NumericsError, match=r"differ by .* from its unmodified head's"):
        check_head(policy_model(name), layout="packed", **OPTIONS)


def test_logit_scale_and_softcap_come_from_the_config() -> None:
    assert head_transform(zoo.config("granite")).logit_scale == 0.25
    assert head_transform(zoo.config("cohere")).logit_scale == 0.25
    assert head_transform(zoo.config("gemma2")).softcap == 3.0
    assert head_transform(zoo.config("llama")) == policy.HeadTransform()


def test_a_model_without_a_backward_pass_is_refused_and_the_check_leaves_no_gradient() -> None:
    options: dict[str, Any] = {"vocab_size": zoo.VOCAB_SIZE, "layout": "packed", "device": CPU}
    model = policy_model("qwen3")
    check_backward(model, **options)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.model.norm.register_forward_hook(lambda *args: _NoBackward.apply(args[-1]))
    with pytest.raises(NumericsError, match=r"^Qwen3ForCausalLM cannot be trained: NotImplementedError: no kernel"):
        check_backward(model, **options)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for that")
