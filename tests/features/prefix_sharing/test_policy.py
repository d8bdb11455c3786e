"""Shared prompts change no logprob and no gradient, and the probe finds models that cannot share them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.data.packing.pack import pack
from fsdptrain.data.packing.prefixes import share_prefixes
from fsdptrain.errors import ConfigError
from fsdptrain.features.prefix_sharing.attention import shared_prefix_attention
from fsdptrain.features.prefix_sharing.probe import probe_prefixes, require_structure
from fsdptrain.model.attention.attention import SEGMENTS, Boundaries, attend
from fsdptrain.model.policy import policy_logprobs
from fsdptrain.model.probes.layout import LayoutProbe, choose_layout, probe_segments
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests import zoo
from tests.exact import Exact, in_float64
from tests.matrix import only
from tests.seam import CPU, gradients, policy_model

EVERY_TERM = LossConfig(kl_loss_coef=0.1, entropy_coef=0.1, use_opsm=True, mismatch_correction="tis")

PACKED = [name for name in zoo.ARCHITECTURES if name != "qwen3_next"]


def group_samples() -> list[Sample]:
    """Two groups and a single sample; prompts and responses exceed the zoo's window of 16."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(zoo.VOCAB_SIZE, (count,), generator=generator).tolist()

    found = []
    for name, prompt, responses in (("a", draw(30), (9, 1, 20)), ("b", draw(5), (7,)), ("c", draw(12), (4, 25))):
        for number, length in enumerate(responses):
            mask = [False] * len(prompt) + [True] * length
            engine = [-5.0 * m for m in mask]
            found.append(Sample(name, prompt + draw(length), mask, engine, advantage=number - 0.7))
    return found


def packed(*, sharing: bool) -> PackedBatch:
    samples = group_samples()
    totals = count_totals([num_loss_tokens(sample) for sample in samples])
    batch = pack(samples, aggregation="token_mean", totals=totals, max_response_len=30)
    return replace(batch, shared=share_prefixes(samples)) if sharing else batch


def near(batch: PackedBatch) -> PackedBatch:
    """With logprobs of an old policy and a reference."""
    noise = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(1))
    return replace(batch, old_logprobs=-5.5 + 0.3 * noise[0], ref_logprobs=-5.5 + 0.3 * noise[1])


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients together, relative to their norm."""
    assert found.keys() == wanted.keys()
    square = sum((found[name] - wanted[name]).double().square().sum() for name in wanted)
    return (square / sum(x.double().square().sum() for x in wanted.values())).sqrt().item()  # pyright: ignore


def logprobs_of(model: PreTrainedModel, batch: PackedBatch, **options: Any) -> LogProbs:
    return policy_logprobs(model, batch, layout="packed", temperature=0.9, with_entropy=True, **options)


def both(model: PreTrainedModel, objective: Callable[[PackedBatch], Tensor]) -> tuple[float, float]:
    """(difference of the objective, distance of its gradients) with shared prompts from without."""
    values, found = [], []
    for sharing in (False, True):
        values.append(objective(near(packed(sharing=sharing))))
        found.append(gradients(model, values[-1]))
    return abs((values[1] - values[0]).item()), distance(found[1], found[0])


@pytest.mark.parametrize("name", only(["qwen3", "gpt_oss"], PACKED))
def test_losses_and_gradients_of_attention_models_are_exact(name: str) -> None:
    model = in_float64(policy_model(name))
    with Exact():
        value, gradient = both(model, lambda batch: LOSSES["grpo"](batch, logprobs_of(model, batch), EVERY_TERM).loss)
    assert value < 1e-11
    assert gradient < 1e-11


def probe(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> float:
    layout = choose_layout(model, "auto", vocab_size=zoo.VOCAB_SIZE, compute_dtype=dtype, device=CPU)
    return probe_prefixes(model, probe_segments(model, zoo.VOCAB_SIZE), layout, device=CPU)


@pytest.mark.parametrize("name", only(["qwen3", "gpt_oss"], PACKED))
def test_the_probe_accepts_attention_models(name: str) -> None:
    with Exact():
        assert probe(in_float64(policy_model(name))) < 1e-12


def test_layers_with_a_short_convolution_do_not_share() -> None:
    """It knows the boundaries of packs, but not prefixes."""
    model = policy_model("qwen3")
    starts: list[int] = []

    def note(_: Any, __: Any, kwargs: Any) -> None:
        starts[:] = kwargs["boundaries"].cu_seqlens[:-1].tolist()

    def mix(_: Any, args: Any) -> Any:
        before = F.pad(args[0], (0, 0, 1, 0))[:, :-1].clone()
        before[:, starts] = 0
        return (args[0] + 0.3 * before,)

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(mix)
    layout = LayoutProbe("packed", SEGMENTS, max_difference=0.0, tolerance=1e-4)
    with pytest.raises(ConfigError, match="--prefix-sharing: it differs by"):
        probe_prefixes(model, probe_segments(model, zoo.VOCAB_SIZE), layout, device=CPU)


def blind_to(what: str) -> Any:
    """Our attention over shared prefixes without the prefix, or with another one."""

    def blind(*args: Any, boundaries: Boundaries, **options: Any) -> Any:
        if boundaries.attention is not None and what == "prefix":
            boundaries = replace(boundaries, attention=None)
        if boundaries.attention is not None and what == "first":
            shared, of_keys = boundaries.attention.args
            moved = replace(shared, rows=(shared.rows + 1).clamp(max=shared.num_tokens - 1))
            boundaries = replace(boundaries, attention=partial(shared_prefix_attention, moved, of_keys))
        return attend(*args, varlen=False, boundaries=boundaries, **options)

    return blind


@pytest.mark.parametrize("what", ["prefix", "first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "changes"), [("qwen3", {}), ("gemma3", {"sliding_window": 512})])
def test_an_attention_without_the_right_prefix_is_found(name, changes, what, dtype):
    model = policy_model(name, **changes).to(dtype)
    ours = ALL_ATTENTION_FUNCTIONS[SEGMENTS]
    AttentionInterface.register(SEGMENTS, blind_to(what))
    try:
        with pytest.raises(ConfigError, match=r"--prefix-sharing: (it differs by|one sequence moves)"):
            probe(model, dtype)
    finally:
        AttentionInterface.register(SEGMENTS, ours)


def test_a_recurrent_model_is_refused_before_its_files_are_read() -> None:
    require_structure(zoo.meta("qwen3"))
    with pytest.raises(ConfigError, match=r"--prefix-sharing: its recurrent mixers .*remove it"):
        require_structure(zoo.meta("qwen3_next"))
