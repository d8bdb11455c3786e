"""The laws of a model on a mesh. What N ranks compute, save, export and send is what one rank does; a case is data.

All cases of a mesh size run in one group of ranks. Laws of each:

1. gradients, metrics and weights of optimizer steps are those of one rank with one pack, without the options of the
   mesh, up to the order of summation; in one step all ranks but one have no work,
2. options that only move or recompute (MEMORY) change no bit of gradients and weights,
3. a resumed run is bitwise the run that does not stop but is offloaded once, in the state that it loads and in its
   next step; the checkpoint of one rank is loaded bitwise,
4. the export before training is the checkpoint,
5. the stream to engines, which gathers the weights, is the export, bit by bit, however large its slices.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptrain.algo.losses import LOSSES
from fsdptrain.checkpoints import newest_checkpoint
from fsdptrain.features.model_parallel.plan import IS_NEW, apply_expert_parallelism
from fsdptrain.features.sections import PrefixSharingConfig
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.optimizer_state import state_tensors
from fsdptrain.types import LossConfig
from tests import zoo
from tests.exact import Exact, backends_in_float64
from tests.families import tiny
from tests.tensors import load_files, relative, same
from tests.testing import save_hub, spawn

from .sharded import full, full_state
from .test_fsdp_backend import config, grouped_samples, keep_gradients, make_steps, scored
from .test_moe import with_routes

EXACT = 1e-11  # in float64, of the largest element of a tensor: only the order of summation differs
ROUNDED = 1e-4  # in float32; a missing or doubled part of a sum would be seen at 0.1
METRICS = 1e-4  # float32
NUM_STEPS = 2
SMALL_PACKS, ONE_PACK = 128, 4096  # tokens: several packs for each rank
MEMORY = {"gradient_checkpointing", "offload_activations", "offload_optimizer"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family and changes
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": zoo.VOCAB_SIZE + IS_NEW}),  # uneven, if it may be
    "few heads": ("qwen3", {"num_key_value_heads": 1}),
    "uneven heads": ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 3}),
    "experts": ("qwen3_moe", {"num_experts": 8}),
    "one expert with biases": ("gpt_oss", {"num_local_experts": 2}),
    "latent attention": ("deepseek_v3", {}),
    "recurrent": ("qwen3_next", {}),
}
KL = {"kl_loss_coef": 0.1}
ROUTED = {"router_replay": "rollout"}
ADAPTER = {"lora_rank": 4, "lora_rslora": True, "lora_modules_to_save": ["lm_head"]}
SPLIT = {"tensor_parallel_size": 2}
DEALT = {"context_parallel_size": 2}
EXPERTS = {"expert_parallel_size": 2}
LAYERS = {"gradient_checkpointing": True, "offload_activations": True}
OPTIMIZER = {"offload_optimizer": True}
SHARED = {"prefix_sharing": True}
IN_PART = {"freeze": ["embed"], "lr_scale": {"q_proj": 2.0}}


@dataclass(frozen=True)
class Case:
    model: str
    mesh: dict[str, Any] = field(default_factory=dict)  # options that must not change a number
    values: dict[str, Any] = field(default_factory=lambda: KL)  # options of one rank too
    is_exact: bool = True  # in float64; split experts and recomputed layers are in float32 only
    loss: str = "grpo"

    @property
    def alone(self) -> str:
        return f"{self.model} {self.values} {self.is_exact} {self.loss}"

    @property
    def is_adapted(self) -> bool:
        """Its exports are compared with those of peft: test_lora.py."""
        return "lora_rank" in self.values

    @property
    def rounded(self) -> float:
        """In float32 other packs alone move the gradients of A_log and dt_bias, sums that cancel, by 9e-5."""
        return 1e-3 if self.model == "recurrent" else ROUNDED

    @property
    def only_moves(self) -> bool:
        return bool(self.mesh) and self.mesh.keys() <= MEMORY


CASES = {
    2: [
        Case("dense"),
        Case("dense", {"layout": "padded", "fsdp_reshard_after_forward": False}, loss="gspo"),
        Case("dense", {"fsdp_cpu_offload": True} | SHARED),
        Case("tied", SPLIT, loss="cispo"),
        Case("few heads", DEALT, loss="sapo"),
        Case("dense", SHARED | {"gradient_checkpointing": True}, ADAPTER, is_exact=False),
        Case("dense", {}, {"optimizer": "muon", "lr_decay_style": "cosine"} | IN_PART),
        Case("dense", {}, {"optimizer": "tests.distributed.test_optimizers:nadam"}, is_exact=False),
        Case("dense", is_exact=False),
        Case("dense", LAYERS | OPTIMIZER, is_exact=False),
        Case("experts", EXPERTS, ROUTED, is_exact=False),
        Case("experts", SPLIT | EXPERTS, is_exact=False),
    ],
    4: [
        Case("dense", {"fsdp_replicate_size": 2}),
        Case("uneven heads", {"context_parallel_size": 4}),
        Case("dense", DEALT | SPLIT | {"gradient_checkpointing": True}, is_exact=False),
        Case("experts", DEALT | {"expert_parallel_size": 4}, ROUTED, is_exact=False),  # other packs, same experts
    ],
}
MATRIX = {
    2: [
        Case("recurrent", EXPERTS, is_exact=False),
        Case("latent attention", SPLIT | EXPERTS, is_exact=False),
        Case("one expert with biases", DEALT | EXPERTS, is_exact=False),
        Case("experts", DEALT),
        Case("uneven heads", DEALT),
        Case("dense", DEALT, ADAPTER),
        Case("recurrent"),
        Case("experts", {}, ROUTED, is_exact=False),
        Case("experts", LAYERS, ROUTED, is_exact=False),
        Case("dense", {}, {"optimizer": "sgd"}),
    ],
    4: [
        Case("tied", SPLIT | {"fsdp_replicate_size": 2}),
        Case("experts", EXPERTS | {"fsdp_replicate_size": 2}, is_exact=False),
        Case("one expert with biases", {"expert_parallel_size": 2}, is_exact=False),  # more ranks than experts
        Case("recurrent", SPLIT | EXPERTS, is_exact=False),
        Case("latent attention", {"expert_parallel_size": 4}, is_exact=False),
    ],
}
Step = tuple[dict[str, Tensor], dict[str, float]]  # gradients before clipping, metrics


def build(case: Case, hub: Path, mesh: dict[str, Any]) -> FSDPBackend:
    # with a large epsilon Adam does not blow the rounding of tiny gradients up to whole steps
    options = {} if case.values.get("optimizer") == "sgd" else {"adam_eps": 0.01}
    options |= {"bf16": False, **case.values, **mesh}
    return FSDPBackend(config(str(hub / case.model), **options), total_steps=10)


def steps(backend: FSDPBackend, case: Case, numbers: range, max_tokens: int) -> list[Step]:
    """Each step from the samples of all ranks, as the trainer packs and scores them."""
    gradients, found = keep_gradients(backend._optimizer), []
    shares = backend._config.section(PrefixSharingConfig).prefix_sharing
    for number in numbers:
        items = grouped_samples(2, seed=number)[: 1 if number == 1 else None]
        if "router_replay" in case.values:
            items = with_routes(items, num_experts=MODELS[case.model][1]["num_experts"])
        [step] = make_steps(backend, items, max_tokens)
        assert step.shared > 0 or not shares or len(items) == 1
        with Exact() if case.is_exact else nullcontext():
            packs = scored(backend, step.packs, reference=case.values == KL)
            loss = LossConfig(entropy_coef=0.01, kl_loss_coef=case.values.get("kl_loss_coef", 0.0))
            metrics = backend.train_step(packs, LOSSES[case.loss], loss)
        found.append((dict(gradients), metrics))
    return found


def state(backend: FSDPBackend) -> dict[str, Tensor]:
    """Weights and the optimizer's state."""
    moments = {f"optimizer.{name}": full(value) for name, value in state_tensors(backend._optimizer).items()}
    return full_state(backend.model) | moments


def one_after_the_other(cases: list[Case]) -> Iterator[Case]:
    """Those in float32 first: afterwards all backends of this process are in float64."""
    yield from (case for case in cases if not case.is_exact)
    backends_in_float64()
    yield from (case for case in cases if case.is_exact)


def of_one_rank(cases: list[Case], hub: Path) -> None:
    """Write what one rank computes with one pack, for each case without its mesh."""
    found: dict[str, tuple[list[Step], dict[str, Tensor]]] = {}
    for case in one_after_the_other(cases):
        if case.alone not in found:
            backend = build(case, hub, {})
            taken = steps(backend, case, range(NUM_STEPS), ONE_PACK)
            found[case.alone] = taken, state(backend)
            checkpoints_of(case, hub).write(1, lambda path, backend=backend: backend.save(path, 1))
    torch.save(found, hub / "of one rank.pt")


def checkpoints_of(case: Case, hub: Path) -> CheckpointFolder:
    """Of one rank."""
    name = "".join(letter if letter.isalnum() else "-" for letter in case.alone)
    return CheckpointFolder(hub / "of one rank" / name, keep_last=1)


def broken_laws(cases: list[Case], hub: Path, folder: Path) -> dict[str, list[str]]:
    """For each case the laws that do not hold, on this rank."""
    alone = torch.load(hub / "of one rank.pt", weights_only=False)
    not_moved: dict[str, tuple[list[Step], dict[str, Tensor]]] = {}
    found: dict[str, list[str]] = {}
    for number, case in enumerate(one_after_the_other(cases)):
        backend, own = build(case, hub, case.mesh), folder / str(number)
        broken = found.setdefault(str(case), [])
        if not case.is_adapted:
            backend.export(own / "before")
            if not same(load_files(own / "before"), load_files(hub / case.model)):
                broken.append("the export before training is not the checkpoint")
        taken = steps(backend, case, range(NUM_STEPS), SMALL_PACKS)
        reached = state(backend)
        bound = EXACT if case.is_exact and not case.is_adapted else case.rounded  # adapters are float32
        broken += differences_to_one_rank(taken, full_state(backend.model), *alone[case.alone], bound)
        if not case.mesh:
            not_moved[case.alone] = taken, reached
        elif case.only_moves and case.alone in not_moved:
            others, wanted = not_moved[case.alone]
            bits = [same(one[0], other[0]) for one, other in zip(taken, others, strict=True)]
            broken += [] if all(bits) and same(reached, wanted) else ["bits depend on where something is"]
        broken += broken_on_resume(backend, case, hub, own, reached)
        broken += broken_exports(backend, own / "after") if not case.is_adapted else []
        latest = newest_checkpoint(checkpoints_of(case, hub).directory.parent)
        assert latest is not None
        backend.load(latest)
        broken += [] if same(state(backend), alone[case.alone][1]) else ["the checkpoint of one rank is not loaded"]
    return found


def differences_to_one_rank(
    taken: list[Step], weights: dict[str, Tensor], wanted: list[Step], whole: dict[str, Tensor], bound: float
) -> list[str]:
    broken = []
    for number, ((gradients, metrics), (gradients_alone, metrics_alone)) in enumerate(zip(taken, wanted, strict=True)):
        if not (worst := relative(gradients, gradients_alone)) < bound:
            broken.append(f"step {number}: a gradient differs by {worst:.1e}")
        differing = [n for n, v in metrics_alone.items() if metrics[n] != pytest.approx(v, rel=METRICS, abs=METRICS)]
        broken += [f"step {number}: {name}" for name in differing]
    if not (worst := relative(weights, {name: whole[name] for name in weights})) < bound:
        broken.append(f"a weight differs by {worst:.1e}")
    return broken


def broken_on_resume(backend: FSDPBackend, case: Case, hub: Path, folder: Path, saved: dict[str, Tensor]) -> list[str]:
    """Save, take another step; load into a new backend, take the same step."""
    CheckpointFolder(folder, keep_last=1).write(1, lambda path: backend.save(path, 1))
    later = range(NUM_STEPS, NUM_STEPS + 1)
    backend.offload()
    backend.onload()
    straight = steps(backend, case, later, SMALL_PACKS)
    other = build(case, hub, case.mesh)
    latest = newest_checkpoint(folder)
    assert latest is not None
    other.load(latest)
    broken = [] if same(state(other), saved) else ["what is loaded is not what was saved"]
    resumed = steps(other, case, later, SMALL_PACKS)
    if resumed[0][1] != straight[0][1] or not same(state(other), state(backend)):
        broken.append("the step after a resume is not that without")
    return broken


def broken_exports(backend: FSDPBackend, target: Path) -> list[str]:
    backend.export(target)
    exported = load_files(target)
    return [] if same(dict(backend.hf_weights()), exported) else ["the stream is not the export"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each model, and what one rank computes."""
    folder = tmp_path_factory.mktemp("hub")
    for name, (family, changes) in MODELS.items():
        save_hub(tiny(family, **changes), folder / name)
    return folder


@pytest.mark.parametrize("ranks", CASES)
def test_a_mesh_computes_saves_exports_and_sends_what_one_rank_does(hub: Path, tmp_path: Path, ranks: int) -> None:
    require_laws(CASES[ranks], ranks, hub, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", MATRIX)
def test_more_families_and_meshes_do_so_too(hub: Path, tmp_path: Path, ranks: int) -> None:
    require_laws(MATRIX[ranks], ranks, hub, tmp_path)


def require_laws(cases: list[Case], ranks: int, hub: Path, folder: Path) -> None:
    if apply_expert_parallelism is None:  # no model can be split: tests/oldest.py
        cases = [case for case in cases if not case.mesh.keys() & (SPLIT.keys() | EXPERTS.keys())]
    spawn(1, of_one_rank, cases, hub)
    for found in spawn(ranks, broken_laws, cases, hub, folder):
        assert {case: broken for case, broken in found.items() if broken} == {}
