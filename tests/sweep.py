"""What becomes of each family on two real ranks: loaded, trained one step, exported; or refused before the first step.

    rows = sweep(["llama", "mamba"], folder)

Judged against transformers alone: the files as `save_pretrained` wrote them, and the gradients of a plain model that
sees one sequence at a time, with the loss written down here.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdptrain.algo.losses import LOSSES
from fsdptrain.algo.weights import count_totals, num_loss_tokens
from fsdptrain.backends.fsdp import FSDPBackend
from fsdptrain.config import Config
from fsdptrain.data.packing import pack, plan_packs
from fsdptrain.errors import FsdptrainError
from fsdptrain.models.collective import gather
from fsdptrain.models.layout import LayoutProbe
from fsdptrain.models.materialize import quiet_transformers
from fsdptrain.testing import spawn
from fsdptrain.types import LossConfig, Sample
from tests import families, zoo

RANKS = 2
TEMPERATURE = 0.9
MAX_TOKENS = 90  # of a pack: two or three sequences
LENGTHS = ((5, 24), (3, 39), (8, 11), (1, 30), (6, 17), (2, 2))  # prompt, response; windows of 16 are exceeded
NOISE = 1e-7  # of the norm of all gradients: what has less has none (a bias of keys, which a softmax does not see)


@dataclass(frozen=True)
class Row:
    """What was found of one family."""

    name: str
    refusal: str = ""  # the one line that the backend gave at start; the rest is then empty
    layout: str = ""
    attention: str = ""
    reason: str = ""  # why it is not packed with our attention
    loaded: bool = False  # every parameter and buffer as in the plain model, bit by bit
    exported: bool = False  # the names and tensors of the files, bit by bit
    streamed: bool = False  # the same of what goes to an engine
    gradient_error: float = float("nan")  # worst parameter: 2-norm of the difference to the plain model, relative


def sweep(names: list[str], folder: Path, *, timeout: float = 600.0) -> list[Row]:
    """All of `names` on the same two ranks, whose checkpoints are written into `folder`."""
    first, *_ = spawn(RANKS, _rows, names, folder, timeout=timeout)
    return first


def _rows(names: list[str], folder: Path) -> list[Row]:
    with quiet_transformers():
        for name in names if dist.get_rank() == 0 else ():  # on other ranks save_pretrained writes nothing
            families.save(name, folder / name)
        dist.barrier()
        return [_row(name, folder / name) for name in names]


def _row(name: str, source: Path) -> Row:
    try:
        backend = FSDPBackend(_config(source), total_steps=2)
    except FsdptrainError as error:
        return Row(name, refusal=str(error))
    except Exception:
        return Row(name, refusal=traceback.format_exc())
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    probe: LayoutProbe = backend.layout_probe
    loaded = _equal(_tensors(backend.model), _tensors(plain))
    files = load_files(source)
    streamed = _equal(dict(backend.hf_weights()), files)
    backend.export(source.with_name(f"{name}-exported"))
    exported = dist.get_rank() != 0 or _equal(load_files(source.with_name(f"{name}-exported")), files)
    return Row(
        name,
        layout=probe.layout,
        attention=probe.attention,
        reason=probe.reason,
        loaded=all(gather(loaded)),
        exported=all(gather(exported)),
        streamed=all(gather(streamed)),
        gradient_error=_gradient_error(backend, plain),
    )


def load_files(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _config(checkpoint: Path) -> Config:
    return Config(
        hf_checkpoint=str(checkpoint),
        bf16=False,
        rollout_temperature=TEMPERATURE,
        rollout_max_response_len=64,
        logprob_chunk_size=16,
        clip_grad=1.0,
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, tied ones by each of their names, and all buffers, those too that no file holds; whole."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def _samples() -> list[Sample]:
    """Advantages of both signs; old logprobs near those of a random model, some far enough to be clipped."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index, (prompt, response) in enumerate(LENGTHS):
        length = prompt + response
        tokens = torch.randint(5, zoo.VOCAB_SIZE, (length,), generator=generator).tolist()
        mask = [False] * prompt + [True] * response
        old = (-5.6 + 0.3 * torch.randn(length, generator=generator)).tolist()
        advantage = (-1.0) ** index * (1.0 + 0.3 * index)
        samples.append(Sample(str(index), tokens, mask, [o if m else 0.0 for o, m in zip(old, mask, strict=True)], advantage=advantage))
    return samples


def _gradient_error(backend: FSDPBackend, plain: nn.Module) -> float:
    found = _gradients(backend)
    wanted = _plain_gradients(plain)
    if found.keys() != wanted.keys():
        return float("inf")
    noise = NOISE * torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    return max(_error(found[name], wanted[name], noise) for name in wanted)


def _error(found: Tensor, wanted: Tensor, noise: Tensor) -> float:
    if max(found.norm(), wanted.norm()) < noise:
        return 0.0
    return ((found - wanted).norm() / wanted.norm()).item()


def _gradients(backend: FSDPBackend) -> dict[str, Tensor]:
    """Of one step, before clipping, whole; parameters that got none have zeros."""
    samples = _samples()
    plan = plan_packs([len(s.token_ids) for s in samples], num_ranks=RANKS, max_tokens=MAX_TOKENS)
    totals = count_totals([num_loss_tokens(s) for s in samples])
    packs = [
        pack([samples[i] for i in indices], aggregation="sequence_mean", totals=totals, max_response_len=64)
        for indices in plan.packs[dist.get_rank()]
    ]
    packs = [_with_old_logprobs(batch) for batch in packs]
    found: dict[str, Tensor] = {}
    optimizer, clip = backend._optimizer, backend._optimizer.clip

    def keep_and_clip() -> Tensor:
        for name, p in backend.model.named_parameters():
            found[name] = torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor().clone()
        return clip()

    optimizer.clip = keep_and_clip
    backend.train_step(packs, LOSSES["grpo"], LossConfig())
    return found


def _with_old_logprobs(batch):
    from dataclasses import replace

    return replace(batch, old_logprobs=batch.rollout_logprobs)


def _plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    """GRPO by the book (arXiv 2402.03300): each sequence by itself, the mean over sequences of means over tokens."""
    samples = _samples()
    for sample in samples[dist.get_rank() :: RANKS]:
        ids = torch.tensor(sample.token_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:])
        ratio = (logprobs - torch.tensor(sample.rollout_logprobs[1:]))[mask].exp()
        gain = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        (-gain.mean() / len(samples)).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients
