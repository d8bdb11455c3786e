"""With --deterministic-mode on a CPU, no bit of a logprob depends on what else is computed, here or in the engine."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.feature import check_features
from fsdptrain.features.batch_invariant.kernels import Invariant
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.model.policy import plain_batch
from fsdptrain.rollout.embedded.engine import build_hf_engine
from fsdptrain.types import Prompt, SamplingParams
from tests import zoo
from tests.e2e import command
from tests.e2e.command import UNEVALUATED, metrics_of, trained
from tests.testing import save_tiny_checkpoint, spawn, tiny_tokenizer

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "phi3")


def sequences(rng: Random) -> list[list[int]]:
    """From shorter than a block of queries to longer than a block of keys."""
    return [[rng.randrange(5, 260) for _ in range(length)] for length in (3, 9, 16, 17, 31, 64, 65, 90, 130)]


def compared(checkpoint: str) -> tuple[list[list[float]], int, int]:
    """Logprobs of sequences one by one; the numbers that differ in packs, and between trainer and engine."""
    rng = Random(0)
    config = Config(hf_checkpoint=checkpoint, deterministic_mode=True, bf16=False)
    backend = FSDPBackend(config, total_steps=1)

    def logprobs(chosen: list[list[int]]) -> list[Tensor]:
        pack = plain_batch(chosen, device=CPU)
        found = backend.compute_logprobs([pack], "policy")[0].values.split(pack.seqlens)
        return [values[:-1] for values in found]

    alone = [logprobs([ids])[0] for ids in sequences(rng)]
    in_packs = 0
    for _ in range(4):
        order = rng.sample(range(len(alone)), rng.randrange(2, len(alone) + 1))
        found = logprobs([sequences(Random(0))[i] for i in order])
        in_packs += sum(int((values != alone[i]).sum()) for i, values in zip(order, found, strict=True))
    engine = build_hf_engine(config, checkpoint=Path(checkpoint), device=CPU)
    engine.use_features(backend.features)
    engine.update_weights(backend.hf_weights("module"), 0)
    prompts = [Prompt(str(i), ids[: 1 + len(ids) // 2], "") for i, ids in enumerate(sequences(Random(0)))]
    made = engine.generate(prompts, SamplingParams(num_samples=2, max_tokens=70))
    whole = [[*prompts[int(one.prompt_id)].token_ids, *one.token_ids] for one in made]
    in_engine = sum(
        int((values[-len(one.token_ids) :] != torch.tensor(one.logprobs)).sum())
        for one, values in zip(made, logprobs(whole), strict=True)
    )
    return [values.tolist() for values in alone], in_packs, in_engine


def compared_with_threads(checkpoint: str, threads: int) -> tuple[int, int]:
    torch.set_num_threads(threads)
    return compared(checkpoint)[1:]


def test_no_bit_depends_on_where_vectors_and_threads_end(tmp_path: Path) -> None:
    """The width of the MLP is no multiple of a vector, and large enough for several threads."""
    checkpoint = save_tiny_checkpoint(tmp_path, hidden_size=256, intermediate_size=700, num_hidden_layers=2)
    assert spawn(1, compared_with_threads, str(checkpoint), 3) == [(0, 0)]


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "compile"])
def test_layers_that_are_computed_elsewhere_are_refused(flag: str, tmp_path: Path) -> None:
    config = Config(hf_checkpoint=str(save_tiny_checkpoint(tmp_path)), deterministic_mode=True, **{flag: True})
    with pytest.raises(ConfigError, match="--deterministic-mode does not work with"):
        check_features(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_the_pack_the_ranks_or_the_engine(family: str, tmp_path: Path) -> None:
    zoo.build(family, 0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    [one] = spawn(1, compared, str(tmp_path))
    for other in [one] if family != "qwen3" else [one, *spawn(2, compared, str(tmp_path))]:
        assert other == (one[0], 0, 0)


def test_a_run_reports_no_difference_between_trainer_and_engine(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    flags: list[Any] = ["--hf-checkpoint", str(checkpoint), *UNEVALUATED, "--deterministic-mode", "--num-rollout", "3"]
    result = command.run([*flags, "--output-dir", str(tmp_path / "run")], tmp_path)
    assert result.code == 0, result.err
    rows = trained(metrics_of(tmp_path / "run"))
    assert [row["weight_sync/logprob_abs_diff"] for row in rows[:-1]] == [0.0] * 2  # none after the last step
    assert [row["mismatch/abs_max"] for row in rows] == [0.0] * 3
    assert rows[-1]["optim/grad_norm"] > 0


def causal(width: int, length: int, pads: Tensor, window: int | None = None) -> Tensor:
    at = torch.arange(length)
    seen = (at <= at[length - width :, None]) & (at >= pads[:, None, None])
    return (seen if window is None else seen & (at > at[length - width :, None] - window))[:, None]


@pytest.mark.parametrize("width", [1, 5, 37])
@pytest.mark.parametrize("window", [None, 8])
def test_attention_is_that_of_torch_whatever_the_mask(width: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, length, 8, generator=generator, dtype=torch.float64)
        for heads, length in ((4, width), (2, 37), (2, 37))
    )
    pads = torch.tensor([0, 5, 20])
    options = {"attn_mask": causal(width, 37, pads, window), "enable_gqa": True, "scale": 0.3}
    wanted = F.scaled_dot_product_attention(query, key, value, **options)
    with Invariant():
        found = F.scaled_dot_product_attention(query, key, value, **options)
    for row, pad in enumerate(pads.tolist()):
        start = max(0, pad - (37 - width))  # queries before it are padding
        torch.testing.assert_close(found[row, :, start:], wanted[row, :, start:])


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_without_a_mask_is_that_of_torch_with_its_gradient(is_causal: bool) -> None:
    inputs = [torch.randn(2, 4, 70, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    with Invariant():
        found = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(x, inputs, grad) for x in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
