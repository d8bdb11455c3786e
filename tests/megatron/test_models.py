"""megatron-core computes what transformers computes, forward and backward, and gives back the bits that it was given,
however the model is split. All cases of as many ranks are computed by the same processes: to import it takes longer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdptrain.models.policy import plain_batch
from fsdptrain.testing import spawn
from fsdptrain.types import PackedBatch
from tests.megatron import cases

LENGTHS = ((7, 12), (5, 9, 11), (13, 4), (6,))  # of the segments of four packs: rows of several shapes


class Case(NamedTuple):
    family: str
    layout: dict[str, Any]
    num_ranks: int = 1
    tied: bool = False
    renormalised: bool = False  # weights of the chosen experts

    @property
    def name(self) -> str:
        split = [f"{key}={value}" for key, value in self.layout.items()]
        return "-".join([self.family, *split, *(["on four"] if self.num_ranks == 4 else [])])

    @property
    def changes(self) -> dict[str, Any]:
        return {"tie_word_embeddings": self.tied} | ({"norm_topk_prob": True} if self.renormalised else {})


CASES = [
    Case("qwen3", {}, tied=True),
    Case("llama", {}),
    Case("qwen3_moe", {}),
    Case("qwen3", {"tensor_parallel": 2}, 2),
    Case("llama", {"tensor_parallel": 2}, 2, tied=True),
    Case("qwen2", {"tensor_parallel": 2}, 2),  # whose queries, keys and values have biases
    Case("qwen3", {"pipeline_parallel": 2}, 2, tied=True),  # embedding and head are on different ranks
    Case("llama", {"pipeline_parallel": 2}, 2),
    Case("qwen3_moe", {"pipeline_parallel": 2}, 2),
    Case("qwen3_moe", {"expert_parallel": 2}, 2, renormalised=True),
    Case("qwen3_moe", {"expert_parallel": 2, "moe_dispatcher": "allgather"}, 2),
    Case("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}, 2, tied=True),
    Case("qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True}, 2),
    Case("deepseek_v3", {}),
    Case("deepseek_v3", {"pipeline_parallel": 2}, 2),
    Case("deepseek_v3", {"expert_parallel": 2}, 2),
    Case("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}, 4, tied=True),
    Case("qwen3_moe", {"pipeline_parallel": 2, "expert_parallel": 2}, 4),
    # below two ranks each have the same part of the model
    Case("qwen3_moe", {"expert_parallel": 2}, 4, renormalised=True),
    Case("qwen3", {"pipeline_parallel": 2}, 4, tied=True),
    Case("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}, 4, tied=True),
]


class Found(NamedTuple):
    """Of one case, on one rank."""

    difference: float  # the largest of a logprob
    gradient: float  # the largest difference, relative to the largest of its tensor
    norm: float  # relative difference of that of all gradients
    not_compared: int  # gradients
    hub: bool  # what comes out by the names of the files is bitwise what they hold, no more and no less
    modules: bool  # and by the names of the modules


def packs() -> list[PackedBatch]:
    found = []
    for i, lengths in enumerate(LENGTHS):
        segments = [cases.tokens(1, n, seed=10 * i + k)[0].tolist() for k, n in enumerate(lengths)]
        found.append(plain_batch(segments, device=torch.device("cpu")))
    return found


def stock_pass(stock: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each pack, segment by segment, and the gradients of their sum by the names in the files."""
    found = []
    for batch in packs():
        parts = []
        for ids in batch.input_ids.split(batch.seqlens):
            logprobs = stock(ids[None]).logits[0].log_softmax(-1)
            chosen = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
            parts += [chosen, torch.zeros(1)]
        found.append(torch.cat(parts))
    torch.stack([values.sum() for values in found]).sum().backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stock.named_parameters()}
    return [values.detach() for values in found], gradients


def compare(names: list[str], folder: Path) -> dict[str, Found]:
    """Every case of `names`, one after the other, in the processes of one spawn."""
    from fsdptrain.backends.megatron.groups import stop_groups

    found = {}
    for case in (case for case in CASES if case.name in names):
        found[case.name] = compared(case, folder / case.name)
        stop_groups()
    return found


def compared(case: Case, folder: Path) -> Found:
    """Packs are dealt over the data-parallel ranks."""
    from fsdptrain.backends.megatron.forward import Scorer, from_last_stage, run_packs
    from fsdptrain.backends.megatron.gradients import reduce_gradients, wrap
    from fsdptrain.backends.megatron.groups import Groups
    from fsdptrain.backends.megatron.masters import Masters
    from fsdptrain.backends.megatron.weights import by_module, hub_state

    built = cases.build(folder, **case.layout)
    groups, wrapped = Groups.present(), wrap(built.model)
    masters = Masters(wrapped)
    scorer = Scorer(cases.VOCAB_SIZE, "padded", chunk_size=8)
    wanted, gradients = stock_pass(built.stock)
    rank, size = groups.data.rank(), groups.data.size()
    own = [packs()[i] for i in range(len(LENGTHS)) if i % size == rank]

    def finish(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = scorer(built.model, hidden, batch, with_entropy=False)
        return logprobs.values.sum(), torch.zeros((), dtype=torch.int), logprobs.values.detach()

    wrapped.zero_grad_buffer()
    gathers = case.layout.get("moe_dispatcher") == "allgather"
    values = run_packs(wrapped, own, finish, layout="padded", train=True, same_shape=groups.expert if gathers else None)
    reduce_gradients(wrapped, masters)
    last = groups.stage.rank() == groups.stage.size() - 1
    values = from_last_stage(values if last else None, [batch.advantages for batch in own])
    expected = [x for i, x in enumerate(wanted) if i % size == rank]
    difference = max((a - b).abs().max().item() for a, b in zip(values, expected, strict=True))

    files, state = load_file(folder / "model.safetensors"), built.stock.state_dict()
    hub = dict(equal(built.weights.stream(), files))
    modules = dict(equal(by_module(built.weights.stream(), built.stock), state))
    for name, parameter in built.stock.named_parameters():
        parameter.data = gradients[name]
    theirs = hub_state(built.stock)
    theirs = {name: gradient for name, gradient in theirs.items() if name not in dict(built.stock.named_buffers())}
    worst = {
        name: ((tensor - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-3)).item()
        for name, tensor in built.weights.stream(of=masters.whole_gradient, only_parameters=True)
    }
    wanted_norm = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm()
    left = state.keys() - modules.keys() <= ({"lm_head.weight"} if case.tied else set())
    return Found(
        difference,
        torch.tensor(list(worst.values())).max().item(),  # nan, if there is one
        abs(masters.total_norm().item() / wanted_norm.item() - 1),
        len(theirs.keys() ^ worst.keys()),
        hub.keys() == files.keys() and all(hub.values()),
        left and all(modules.values()),
    )


def equal(weights: Iterator[tuple[str, Tensor]], wanted: dict[str, Tensor]) -> Iterator[tuple[str, bool]]:
    for name, tensor in weights:
        yield name, torch.equal(tensor, wanted[name])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """Of each case what each rank found."""
    folder = tmp_path_factory.mktemp("models")
    for case in CASES:
        cases.save(case.family, folder / case.name, **case.changes)
    results: dict[str, list[Found]] = {}
    for num_ranks in (1, 2, 4):
        names = [case.name for case in CASES if case.num_ranks == num_ranks]
        ranks = spawn(num_ranks, compare, names, folder, timeout=600)
        results |= {name: [rank[name] for rank in ranks] for name in names}
    return results


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_logprobs_and_gradients_are_those_of_transformers(found, case) -> None:
    for rank in found[case.name]:
        assert rank.difference < 1e-5
        assert rank.gradient < 1e-4
        assert rank.norm < 1e-5
        assert rank.not_compared == 0


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_was_loaded_comes_out_bitwise(found, case) -> None:
    for rank in found[case.name]:
        assert rank.hub
        assert rank.modules
