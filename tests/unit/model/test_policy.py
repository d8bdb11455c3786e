"""The policy's forward scores a pack as the stock model scores each sequence alone, forward and backward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.errors import NumericsError
from fsdptrain.feature import Feature, Features
from fsdptrain.features.activation_memory.checkpointing import enable_gradient_checkpointing
from fsdptrain.features.prefix_sharing.feature import PrefixSharingFeature
from fsdptrain.model import policy
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import (
    check_backward,
    check_head,
    head_transform,
    install_policy_forward,
    plain_batch,
    policy_logprobs,
)
from fsdptrain.model.rows import Layout
from tests import zoo
from tests.exact import Exact, in_float64

CPU = torch.device("cpu")
LENGTHS = (37, 5, 50, 21, 1)  # longer and shorter than the zoo's window of 16
LAYOUTS: tuple[Layout, ...] = ("packed", "padded")
REFUSE_PACKS = {"qwen3_next"}


def segments(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(zoo.VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def policy_model(name: str, chunk_size: int = 16, *, more: Sequence[Feature] = (), **changes: Any) -> PreTrainedModel:
    register_attention()
    model = zoo.build(name, **changes)
    model.set_attn_implementation(SEGMENTS)
    install_policy_forward(model, chunk_size=chunk_size, features=Features([PrefixSharingFeature(), *more]))
    return model


def weights(values: Tensor) -> Tensor:
    """A gradient that differs from token to token."""
    return torch.linspace(-1.0, 2.0, values.numel())


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def stock_one_by_one(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logprobs [T] (0 at the end of a segment), entropy [T], gradients: the untouched model with its own attention."""
    model = in_float64(zoo.build(name))
    model.set_attn_implementation("eager")
    values, entropies = [], []
    with Exact():
        for segment in segments():
            ids = torch.tensor([segment])
            logp = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            end = torch.zeros(1)
            values.append(torch.cat([logp.gather(1, ids[0, 1:, None])[:, 0], end]))
            entropies.append(torch.cat([-(logp.exp() * logp).sum(-1), end]))
        joined, entropy = torch.cat(values), torch.cat(entropies)
        found = gradients(model, (weights(joined) * (joined + 0.5 * entropy)).sum())
    return joined.detach(), entropy.detach(), found


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_packed_and_padded_are_exact_for_every_architecture(name: str) -> None:
    wanted, wanted_entropy, wanted_gradients = stock_one_by_one(name)
    largest = max(gradient.abs().max().item() for gradient in wanted_gradients.values())
    model = in_float64(policy_model(name))
    for layout in LAYOUTS:
        if layout == "packed" and name in REFUSE_PACKS:
            continue
        with Exact():
            batch = plain_batch(segments(), device=CPU)
            found = policy_logprobs(model, batch, layout=layout, with_entropy=True)
            assert found.entropy is not None
            found_gradients = gradients(model, (weights(wanted) * (found.values + 0.5 * found.entropy)).sum())
        torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-11)
        torch.testing.assert_close(found.entropy, wanted_entropy, rtol=0, atol=1e-11)
        assert found_gradients.keys() == wanted_gradients.keys()
        for key, gradient in wanted_gradients.items():
            difference = (found_gradients[key] - gradient).abs().max().item()
            assert difference <= 1e-11 * largest, f"{layout} {key}"


@pytest.mark.parametrize("name", sorted(REFUSE_PACKS))
def test_a_recurrent_mixer_without_kernels_refuses_packs_aloud(name: str) -> None:
    with pytest.raises(ValueError, match="packed sequences"):
        policy_logprobs(policy_model(name), plain_batch(segments(), device=CPU), layout="packed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_segment_does_not_know_its_neighbours(layout: Layout) -> None:
    model = policy_model("qwen3")
    others = [segments(seed=seed) for seed in (0, 1)]
    kept = others[0][2]
    start, stop = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    found = []
    for neighbours in others:
        batch = plain_batch([*neighbours[:2], kept, *neighbours[3:]], device=CPU)
        found.append(policy_logprobs(model, batch, layout=layout).values[start:stop])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_sequence_that_would_change_the_rotation_of_a_short_one_is_refused(layout: Layout) -> None:
    """phi3 takes other frequencies for the whole batch when its longest sequence exceeds the original length."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(i + 2) for i in range(8)], "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = policy_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)

    def first(*lengths: int) -> Tensor:
        return policy_logprobs(model, plain_batch(segments(lengths), device=CPU), layout=layout).values[: lengths[0]]

    torch.testing.assert_close(first(40, 64), first(40))
    torch.testing.assert_close(first(70, 100), first(70))
    with pytest.raises(NumericsError, match=r"sequences of 40 and 65 tokens, and beyond 64 .*--rollout-max-response"):
        first(40, 65)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frequencies_that_follow_the_longest_sequence_are_refused_beyond_the_first_ones(layout: Layout) -> None:
    """Dynamic scaling: what a long sequence changes stays, for shorter ones and for the calls that come."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = policy_model("llama", rope_parameters=rope, max_position_embeddings=64)

    def first(*lengths: int) -> Tensor:
        return policy_logprobs(model, plain_batch(segments(lengths), device=CPU), layout=layout).values[: lengths[0]]

    torch.testing.assert_close(first(40, 64), first(40))
    for lengths in ((40, 65), (70,), (70, 100)):
        with pytest.raises(NumericsError, match=r"beyond 64 .*dynamic.*--rollout-max-response"):
            first(*lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_loss_positions_are_scored_and_they_do_not_change(layout: Layout) -> None:
    model = policy_model("qwen3")
    every = plain_batch(segments(), device=CPU)
    some = every.loss_positions[::3]
    found = policy_logprobs(model, replace(every, loss_positions=some, loss_places=some.numpy()), layout=layout).values
    wanted = policy_logprobs(model, every, layout=layout).values
    torch.testing.assert_close(found[some], wanted[some], rtol=1e-6, atol=1e-6)
    assert found.count_nonzero() == len(some)


def test_the_temperature_divides_the_logits() -> None:
    model = policy_model("gemma2")
    batch = plain_batch(segments(), device=CPU)
    found = policy_logprobs(model, batch, layout="packed", temperature=0.6).values[: LENGTHS[0] - 1]
    stock = zoo.build("gemma2")
    ids = batch.input_ids[None, : LENGTHS[0]]
    logp = (stock(input_ids=ids, use_cache=False).logits[0, :-1] / 0.6).log_softmax(-1)
    torch.testing.assert_close(found, logp.gather(1, ids[0, 1:, None])[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_the_head_of_every_architecture_is_understood(name: str) -> None:
    options: dict[str, Any] = {"vocab_size": zoo.VOCAB_SIZE, "compute_dtype": torch.float32, "device": CPU}
    assert check_head(policy_model(name), layout="padded", **options) < 2e-6


@pytest.mark.parametrize(
    ("name", "change"),
    [("granite", {"_SCALE_KEYS": {}}), ("cohere", {"_SCALE_KEYS": {}}), ("gemma2", {"_SOFTCAP_KEYS": ()})],
)
def test_a_head_that_is_not_understood_stops_the_run(
    name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value in change.items():
        monkeypatch.setattr(policy, attribute, value)
    with pytest.raises(NumericsError, match=r"differ by .* from those of its stock head"):
        check_head(
            policy_model(name), vocab_size=zoo.VOCAB_SIZE, layout="packed", compute_dtype=torch.float32, device=CPU
        )


def test_configs_say_what_happens_to_logits() -> None:
    assert head_transform(zoo.config("granite")).logit_scale == 0.25
    assert head_transform(zoo.config("cohere")).logit_scale == 0.25
    assert head_transform(zoo.config("gemma2")).softcap == 3.0
    assert head_transform(zoo.config("llama")) == policy.HeadTransform()


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    batch = plain_batch(segments(), device=CPU)
    found = []
    for checkpointed in (False, True):
        model = policy_model(name)
        if checkpointed:
            enable_gradient_checkpointing(model)
        values = policy_logprobs(model, batch, layout="packed").values
        found.append(gradients(model, (weights(values) * values).sum()))
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=0, atol=0)


def test_a_model_that_can_only_score_is_refused_and_one_that_can_be_trained_keeps_no_gradient() -> None:
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
