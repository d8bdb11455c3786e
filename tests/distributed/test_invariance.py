"""Every loss, every aggregation: the gradient of the sharded model is that of one rank and one pack.

The whole way of a step runs here, from each rank's own samples: deal, plan, exchange, pack, forward and backward of a
Qwen3 under FSDP2. Everything is on that can be: old, rollout and reference logprobs that differ, clips that bind, KL,
entropy, off-policy sequence masking, and each correction in turn.
"""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdptrain.algo.corrections import CORRECTIONS
from fsdptrain.algo.kl import KL_ESTIMATORS
from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import AGGREGATIONS
from fsdptrain.fsdp.mesh import build_mesh
from fsdptrain.fsdp.wrap import shard_model
from fsdptrain.model.attention.attention import SEGMENTS, register_attention
from fsdptrain.model.policy import install_policy_forward, plain_batch, policy_logprobs
from fsdptrain.trainer.batches import PackingRules, make_batches
from fsdptrain.trainer.samples.source import own_share
from fsdptrain.types import LogProbs, LossConfig, PackedBatch, Sample
from tests.testing import spawn, tiny_qwen3

from .sharded import SHARDING

MAX_RESPONSE = 24
NUM_SAMPLES = 8
TEMPERATURE = 0.9
Combinations = list[tuple[str, str]]
EACH_LOSS = [(loss, sorted(AGGREGATIONS)[i % len(AGGREGATIONS)]) for i, loss in enumerate(sorted(LOSSES))]
CUTS: dict[int, list[tuple[int, Any]]] = {  # ranks: (tokens of a pack, layout); the first of one rank is one pack
    1: [(4096, "packed"), (50, "packed"), (100, "padded")],
    2: [(50, "packed"), (4096, "padded")],
}
# Of the difference of a parameter's gradient, in the 2-norm, to that gradient: only the order of summation differs.
TOLERANCE = 1e-12
BUSY = ("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/opsm_fraction", "mismatch/out_of_bounds")

Gradients = dict[tuple[str, str], dict[str, Tensor]]  # (loss, aggregation) -> parameter -> this rank's part
Squares = dict[tuple[Any, ...], float]  # (cut, loss and aggregation, parameter) -> of this rank's part


def config_of(number: int) -> LossConfig:
    """Another correction and another KL for each combination; bounds that some tokens leave."""
    corrections, estimators = sorted(CORRECTIONS), sorted(KL_ESTIMATORS)
    return LossConfig(
        eps_clip=0.1, eps_clip_high=0.15, eps_clip_c=1.2, is_cap_high=1.2, use_opsm=True, opsm_delta=0.02,
        mismatch_correction=corrections[number % len(corrections)], mismatch_low=0.8, mismatch_high=1.3,
        kl_loss_coef=0.1, kl_loss_type=estimators[number % len(estimators)], use_unbiased_kl=number % 3 == 0,
        entropy_coef=0.01,
    )  # fmt: skip


def make_model() -> PreTrainedModel:
    model = tiny_qwen3(hidden_size=32, intermediate_size=64).double()
    register_attention()
    model.set_attn_implementation(SEGMENTS)
    install_policy_forward(model, chunk_size=16)
    return model


@torch.no_grad()
def make_samples(model: PreTrainedModel) -> list[Sample]:
    """Unequal lengths, prompts without loss, advantages of both signs; the engine was a little off the model."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(NUM_SAMPLES):
        prompt, response = (int(torch.randint(1, most, (), generator=generator)) for most in (9, MAX_RESPONSE))
        tokens = torch.randint(5, 264, (prompt + response,), generator=generator).tolist()
        alone = plain_batch([tokens], device=torch.device("cpu"))
        found = policy_logprobs(model, alone, layout="packed", temperature=TEMPERATURE).values[prompt - 1 : -1]
        logprobs = (found + 0.2 * torch.randn(response, generator=generator)).tolist()
        advantage = float(torch.randn((), generator=generator))
        mask = [False] * prompt + [True] * response
        made.append(Sample(str(number // 4), tokens, mask, [0.0] * prompt + logprobs, advantage=advantage))
    return made


def off_policy(batch: PackedBatch) -> PackedBatch:
    """Old and reference logprobs off the engine's, by sums and products only: those are the same bits in any place."""
    mask, engine = batch.loss_mask.float(), batch.rollout_logprobs
    old = engine + mask * (batch.labels % 7 - 3) * 0.0625
    ref = engine + mask * (batch.labels % 5 - 2) * 0.125
    return PackedBatch(**{**vars(batch), "old_logprobs": old, "ref_logprobs": ref})


def gradients(
    model: PreTrainedModel, samples: list[Sample], cut: tuple[int, Any], chosen: Combinations, busy: Counter[str]
) -> Gradients:
    max_tokens, layout = cut
    found: Gradients = {}
    for number, (loss, aggregation) in enumerate(chosen):
        rules = PackingRules(max_tokens, aggregation, MAX_RESPONSE, 1, 0, layout)
        [step] = make_batches(own_share(samples), rules, rollout=0)
        model.zero_grad()
        for batch in map(off_policy, step.packs):
            said = policy_logprobs(model, batch, layout=layout, temperature=TEMPERATURE, with_entropy=True)
            output = LOSSES[loss](batch, LogProbs(said.values, said.entropy), config_of(number))
            output.loss.backward()
            busy.update({name: float(output.metrics.get(name, 0.0)) for name in BUSY})
        parts = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[loss, aggregation] = {
            name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in parts.items()
        }
    return found


def measure(file: Path, chosen: Combinations) -> tuple[Squares, Squares, Counter[str]]:
    """Squares of the differences to the gradients in `file` and of these; one rank, which comes first, writes it."""
    expected = torch.load(file) if file.exists() else {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    differences: Squares = {}
    norms: Squares = {}
    busy: Counter[str] = Counter()
    model = make_model()
    samples = make_samples(model)
    shard_model(model, build_mesh(1), compute_dtype=torch.float64, **SHARDING)
    for cut in CUTS[world_size]:
        found = gradients(model, samples, cut, chosen, busy)
        expected = expected or found
        for combination, whole in expected.items():
            for name, wanted in whole.items():
                part = found[combination][name]
                mine = [*wanted.chunk(world_size), *[wanted[:0]] * world_size][rank]  # as FSDP2 shards
                assert part.shape == mine.shape
                key = (cut, combination, name)
                differences[key] = (part - mine).square().sum().item()
                norms[key] = mine.square().sum().item()
    if not file.exists():
        torch.save(expected, file)
    return differences, norms, busy


def over_ranks(parts: list[Squares]) -> Squares:
    return {key: sum(part[key] for part in parts) ** 0.5 for key in parts[0]}


def test_the_gradient_of_every_loss_does_not_depend_on_ranks_packs_or_layout(tmp_path: Path) -> None:
    chosen = EACH_LOSS
    for world_size, cuts in CUTS.items():
        ranks = spawn(world_size, measure, tmp_path / "gradients.pt", chosen, timeout=300)
        differences, norms, busy = zip(*ranks, strict=True)
        found, wanted = over_ranks(list(differences)), over_ranks(list(norms))
        assert {key[:2] for key in found} == set(product(cuts, chosen))
        relative = {key: found[key] / wanted[key] for key in found}
        worst = max(relative, key=lambda key: relative[key])
        assert relative[worst] < TOLERANCE, worst
        assert all(sum(counted[name] for counted in busy) > 0 for name in BUSY), "every mask and clip has had work"
