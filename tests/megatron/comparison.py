"""megatron-core against transformers, however a model is split: in the ranks that a test spawns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fsdptrain.model.policy import plain_batch
from fsdptrain.model.rows import Layout
from fsdptrain.model.structure import vision_parameters
from fsdptrain.types import PackedBatch
from tests.megatron import cases
from tests.megatron.training import whole_gradient
from tests.testing import spawn

LENGTHS = ((7, 12), (5, 9, 11), (13, 4), (6,))  # of the segments of four packs: rows of several shapes


class Case(NamedTuple):
    family: str
    split: dict[str, Any]
    num_ranks: int = 1
    layout: Layout = "padded"
    tied: bool = False
    renormalized: bool = False  # weights of the chosen experts
    num_packs: int = len(LENGTHS)  # over the data-parallel ranks
    layers: int = 0  # 0: as many as usual

    @property
    def name(self) -> str:
        split = [f"{key}={value}" for key, value in self.split.items()]
        layout = [self.layout] * (self.layout == "packed")
        packs = [f"{self.num_packs} packs"] * (self.num_packs != len(LENGTHS))
        return "-".join([self.family, *split, *layout, *packs, *(["on four"] if self.num_ranks == 4 else [])])

    @property
    def changes(self) -> dict[str, Any]:
        more: dict[str, Any] = {"norm_topk_prob": True} if self.renormalized else {}
        more |= {"num_hidden_layers": self.layers} if self.layers else {}
        if self.layout == "packed" and self.family in cases.RECURRENT:  # megatron-core's plain attention takes no packs
            more["layer_types"] = ["linear_attention"] * 4
        return (
            more | ({"sliding_window": None} if self.family == "mistral" else {}) | {"tie_word_embeddings": self.tied}
        )

    @property
    def model(self) -> str:
        """Folder of the checkpoint, of several cases."""
        return f"{self.family}-{self.tied}-{self.renormalized}-{self.layout}-{self.layers}"


class Found(NamedTuple):
    """Of one case, on one rank."""

    difference: float  # the largest of a logprob
    gradient: float  # the largest relative difference of one tensor of the files
    tensor: str  # its name
    norm: float  # relative difference of that of all gradients
    wrong: list[str]  # what came out otherwise than it was loaded, bit by bit, by names of files and of modules

    def require(self, *, gradient: float) -> None:
        assert self.difference < 1e-5
        assert self.gradient < gradient, self.tensor
        assert self.norm < 1e-5
        assert self.wrong == []


def compared(chosen: Sequence[Case], folder: Path) -> dict[str, list[Found]]:
    """Of each case, by name, what each rank found; those of as many ranks by the same processes, which import once."""
    for case in chosen:
        if not (folder / case.model).is_dir():
            cases.save(case.family, folder / case.model, **case.changes)
    found: dict[str, list[Found]] = {}
    for num_ranks in sorted({case.num_ranks for case in chosen}):
        some = [case for case in chosen if case.num_ranks == num_ranks]
        ranks = spawn(num_ranks, compare, some, folder, timeout=900.0)
        found |= {case.name: [rank[i] for rank in ranks] for i, case in enumerate(some)}
    return found


def compare(chosen: Sequence[Case], folder: Path) -> list[Found]:
    from fsdptrain.megatron.groups import stop_groups

    found = []
    for case in chosen:
        found.append(_compare(case, folder / case.model))
        stop_groups()
    return found


def _compare(case: Case, folder: Path) -> Found:
    """Packs are dealt over the data-parallel ranks."""
    from megatron.core import parallel_state as ps

    from fsdptrain.megatron.forward import LogprobsHead, from_last_stage, run_packs
    from fsdptrain.megatron.masters import Masters, wrap

    built = cases.build(folder, **case.split)
    wrong = _changed(built)
    wrapped = wrap(built.model)
    masters = Masters(built.model, wrapped)
    head = LogprobsHead(built.stock.config.get_text_config(), case.layout, chunk_size=8)
    wanted, expected = transformers_says(folder, case.num_packs)
    rank, size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
    own = packs()[: case.num_packs][rank::size]

    def finish(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        values = head(built.model, hidden, batch, with_entropy=False).values
        return (values * batch.advantages).sum(), torch.zeros((), dtype=torch.int), values.detach()

    for part in wrapped:
        part.zero_grad_buffer()
    values = run_packs(wrapped, own, finish, layout=case.layout, train=True)
    masters.reduce_gradients()
    values = from_last_stage(values, [batch.advantages for batch in own])
    errors = [float((a - b).abs().max()) for a, b in zip(values, wanted[rank::size], strict=True)]
    relative = {
        name: float((gradient - expected[name]).norm() / (expected[name].norm() or 1.0))
        for name, gradient in built.weights.stream(of=whole_gradient(masters), only_parameters=True)
    }
    assert relative.keys() == expected.keys()
    worst = max(relative, key=lambda name: _nan_first(relative[name]))
    norm = masters.total_norm() / torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    return Found(max(errors, key=_nan_first), relative[worst], worst, abs(norm.item() - 1), wrong)


def _changed(built: cases.Built) -> list[str]:
    from fsdptrain.megatron.hub_names import by_module, hub_state, module_state
    from fsdptrain.megatron.weights import WeightMap

    return [  # the second by our table, if a bridge loaded
        *_differing(built.weights.stream(), hub_state(built.stock, vision=False)),
        *_differing(WeightMap(built.model, built.stock).stream(), hub_state(built.stock, vision=False)),
        *_differing(by_module(built.weights.stream(), built.stock), module_state(built.stock, vision=False)),
    ]


def _differing(weights: Iterator[tuple[str, Tensor]], wanted: dict[str, Tensor]) -> list[str]:
    found = dict(weights)
    names = found.keys() & wanted.keys()
    return [*(found.keys() ^ wanted.keys()), *(name for name in names if not torch.equal(found[name], wanted[name]))]


def packs() -> list[PackedBatch]:
    """Whose logprobs are multiplied with their advantages to make a loss."""
    found, generator = [], torch.Generator().manual_seed(0)
    for i, lengths in enumerate(LENGTHS):
        segments = [cases.tokens(1, n, seed=10 * i + k)[0].tolist() for k, n in enumerate(lengths)]
        weights = torch.randn(sum(lengths), generator=generator)
        found.append(replace(plain_batch(segments, device=torch.device("cpu")), advantages=weights))
    return found


@cache
def transformers_says(folder: Path, num_packs: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each pack, segment by segment, and the gradients of the loss by the names in the files."""
    stock = cases.load(folder)
    batches, found = packs()[:num_packs], []
    for batch in batches:
        parts = []
        for ids in batch.input_ids.split(batch.seqlens):
            logprobs = stock(ids[None]).logits[0].log_softmax(-1)
            parts += [logprobs[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)]
        found.append(torch.cat(parts))
    losses = [(values * batch.advantages).sum() for values, batch in zip(found, batches, strict=True)]
    torch.stack(losses).sum().backward()
    text = {name: p for name, p in stock.named_parameters() if name not in vision_parameters(stock)}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in text.items()}
    return [values.detach() for values in found], revert_weight_conversion(stock, gradients)


def _nan_first(value: float) -> tuple[bool, float]:
    return math.isnan(value), value
