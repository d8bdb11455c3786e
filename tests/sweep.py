"""What becomes of each family on two real ranks: loaded, trained one step, exported; or refused before the first step.

    rows = sweep(["llama", "mamba", "bert"], folder)
    python -m tests.sweep context    prints what becomes of all of them with --context-parallel-size 2 (tensor, expert)

Judged against transformers alone: the files as `save_pretrained` wrote them, and the gradients of a plain model that
sees one sequence at a time, with the loss written down here. That model computes in float64: what is left is the error
of this package in float32, and not that of the reference.
"""

import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack, plan_packs
from fsdptrain.distributed import gather
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.features.moe.checks import check_replay
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.model.loading.materialize import quiet_transformers
from fsdptrain.model.policy import MODEL_ERRORS
from fsdptrain.model.sizes import expert_choice
from fsdptrain.types import LossConfig, PackedBatch, Sample
from tests import families, zoo
from tests.tensors import load_files, same
from tests.testing import spawn

RANKS = 2
MESHES: dict[str, dict[str, Any]] = {
    "none": {},
    "context": {"context_parallel_size": RANKS},
    "tensor": {"tensor_parallel_size": RANKS},
    "expert": {"expert_parallel_size": RANKS},
}
# What a refusal says to add, and what that is.
WAYS_OUT: dict[str, dict[str, Any]] = {"shard the experts with --expert-parallel-size": {"expert_parallel_size": RANKS}}
TEMPERATURE = 0.9
MAX_TOKENS = 90  # of a pack: two or three sequences
LENGTHS = ((5, 24), (3, 39), (8, 11), (1, 30), (6, 17), (2, 2))  # prompt, response; windows of 16 are exceeded
NOISE = 1e-7  # of the norm of all gradients: what has less has none (a bias of keys, which a softmax does not see)
TOLERANCE = 1e-5  # of a gradient, in float32
WORSE = 10.0  # where float32 cannot do that (sums that cancel): times what the plain model in float32 is off


@dataclass(frozen=True)
class Row:
    """What was found of one family."""

    name: str
    refusal: str = ""  # the one line that the backend gave at start; the rest is then empty
    beside: str = ""  # what the first refusal said to add to the flags of the mesh, and was added
    crash: str = ""  # anything else that it raised
    layout: str = ""
    attention: str = ""
    reason: str = ""  # why it is not packed with our attention
    loaded: bool = False  # every parameter and buffer as in the plain model, bit by bit
    exported: bool = False  # the names and tensors of the files, bit by bit
    streamed: bool = False  # the same of what goes to an engine
    reference: str = ""  # dtype of the plain model
    gradient_error: float = float("nan")  # worst parameter: 2-norm of the difference to the plain model, relative
    plain_error: float = 0.0  # of the plain model in float32, where the former is over TOLERANCE
    has_experts: bool = False
    replay_refusal: str = ""  # why --router-replay is refused

    @property
    def exact(self) -> bool:
        return self.gradient_error < max(TOLERANCE, WORSE * self.plain_error)


def sweep(names: list[str], folder: Path, *, mesh: str = "none", timeout: float = 900.0) -> list[Row]:
    """All of `names` on the same two ranks, whose checkpoints are written into `folder`.

    mesh: of `MESHES`; where that is refused and the refusal knows a way out of `WAYS_OUT`, with that.
    """
    found, other = spawn(RANKS, _rows, names, folder, mesh, timeout=timeout)
    assert [(row.name, row.refusal) for row in found] == [(row.name, row.refusal) for row in other], "all ranks alike"
    return found


def _rows(names: list[str], folder: Path, mesh: str) -> list[Row]:
    with quiet_transformers():
        return [_on_mesh(name, folder / name, MESHES[mesh]) for name in names]


def _on_mesh(name: str, source: Path, values: Mapping[str, Any]) -> Row:
    found = _row(name, source, values)
    for words, more in WAYS_OUT.items():
        if values and words in found.refusal:
            return replace(_row(name, source, {**values, **more}), beside=words)
    return found


def _row(name: str, source: Path, values: Mapping[str, Any] = MappingProxyType({})) -> Row:
    if dist.get_rank() == 0:  # on other ranks save_pretrained writes nothing
        families.save(name, source)
    dist.barrier()
    try:
        backend = FSDPBackend(_config(source, values), total_steps=2)
    except FsdptrainError as error:
        return Row(name, refusal=str(error).replace(str(source), "X"))
    except MODEL_ERRORS:
        return Row(name, crash=traceback.format_exc())
    return _with_gradients(_with_weights(Row(name), backend, source), backend, source)


def _config(checkpoint: Path, values: Mapping[str, Any]) -> Config:
    return Config(
        hf_checkpoint=str(checkpoint), bf16=False, rollout_temperature=TEMPERATURE, rollout_max_response_len=64,
        logprob_chunk_size=16, kl_loss_coef=0.0, **values,
    )  # fmt: skip


def _with_weights(row: Row, backend: FSDPBackend, source: Path) -> Row:
    """What was loaded, and what comes out again: before any step."""
    files, target = load_files(source), source.with_name(f"{source.name}-exported")
    backend.export(target)
    dist.barrier()
    checks = {
        "loaded": same(_tensors(backend.model), _tensors(_plain(source, torch.float32))),
        "exported": same(load_files(target), files),
        "streamed": same(dict(backend.hf_weights()), files),
    }
    probe = backend.layout_probe
    row = replace(row, layout=probe.layout, attention=probe.attention, reason=probe.reason)
    return replace(row, **{name: all(gather(good)) for name, good in checks.items()})


def _with_gradients(row: Row, backend: FSDPBackend, source: Path) -> Row:
    has_experts = expert_choice(backend.hf_config) is not None
    replay_refusal = _replay_refusal(source) if has_experts else ""
    found = _gradients(backend)
    reference, plain_error = "float64", 0.0
    try:
        wanted = _plain_gradients(_plain(source, torch.float64))
    except RuntimeError:  # written for float32 (a mask of xglm): then a reference with an error of its own
        reference, wanted = "float32", _plain_gradients(_plain(source, torch.float32))
    error = _error(found, wanted)
    if error > TOLERANCE and reference == "float64":
        plain_error = _error(_plain_gradients(_plain(source, torch.float32)), wanted)
    return replace(
        row, has_experts=has_experts, replay_refusal=replay_refusal, reference=reference, gradient_error=error,
        plain_error=plain_error,
    )  # fmt: skip


def _replay_refusal(source: Path) -> str:
    """As a run with --router-replay gives it at its start."""
    try:
        check_replay(AutoConfig.from_pretrained(source), "rollout")
    except ConfigError as error:
        return str(error)
    return ""


def _plain(source: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Eager in all it does: the grouped kernel for experts has no float64."""
    return AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, tied ones by each of their names, and all buffers, those too that no file holds; whole."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _samples() -> list[Sample]:
    """Advantages of both signs; old logprobs near those of a random model, some far enough to be clipped."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        tokens = torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist()
        mask = [False] * prompt + [True] * response
        old = torch.where(torch.tensor(mask), -5.6 + 0.3 * torch.randn(length, generator=generator), 0.0).tolist()
        samples.append(Sample(str(index), tokens, mask, old, advantage=(-1.0) ** index * (1.0 + 0.3 * index)))
    return samples


def _gradients(backend: FSDPBackend) -> dict[str, Tensor]:
    """Of one step, before clipping, whole; parameters that got none have zeros."""
    backend._optimizer.clip = _stop
    with suppress(_EnoughError):
        backend.train_step(_packs(backend._config.pack_copies), LOSSES["grpo"], LossConfig())
    return {name: _whole_gradient(parameter) for name, parameter in backend.model.named_parameters()}


class _EnoughError(Exception):
    """The gradients are there. Clipping and Adam, which know no family, would be a third of the time."""


def _stop() -> Tensor:
    raise _EnoughError


def _packs(copies: int) -> list[PackedBatch]:
    samples = _samples()
    plan = plan_packs([len(s.token_ids) for s in samples], num_ranks=RANKS // copies, max_tokens=MAX_TOKENS)
    totals = count_totals([num_loss_tokens(s) for s in samples])
    packs = [
        pack([samples[i] for i in indices], aggregation="sequence_mean", totals=totals, max_response_len=64)
        for indices in plan.packs[dist.get_rank() // copies]
    ]
    return [replace(batch, old_logprobs=batch.rollout_logprobs) for batch in packs]


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.shape)
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def _plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    """GRPO by the book (arXiv 2402.03300): each sequence by itself, the mean over sequences of means over tokens.

    Ranks share the sequences, and add up.
    """
    samples = _samples()
    for sample in samples[dist.get_rank() :: RANKS]:
        ids = torch.tensor(sample.token_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:])
        ratio = (logprobs - torch.tensor(sample.rollout_logprobs[1:]))[mask].exp()
        gain = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        (-gain.mean() / len(samples)).backward()
    gradients = {name: _whole_gradient(parameter) for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def _error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of the worst parameter."""
    if found.keys() != wanted.keys():
        return float("inf")
    noise = NOISE * torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    return max(_relative(found[name], wanted[name], noise) for name in wanted)


def _relative(found: Tensor, wanted: Tensor, noise: Tensor) -> float:
    if max(found.norm(), wanted.norm()) < noise:
        return 0.0
    return ((found - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    every = [name for members in families.FAMILIES.values() for name in members]
    with tempfile.TemporaryDirectory() as temporary:
        for row in sweep(every, Path(temporary), mesh=sys.argv[1], timeout=3600.0):
            beside = f", {row.beside}" if row.beside else ""
            error = f"{row.layout}{beside}, gradients {row.gradient_error:.1e}, exact {row.exact}"
            sys.stdout.write(f"{row.name}: {row.crash or row.refusal or error}\n")
