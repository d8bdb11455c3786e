"""Tensor, expert and context parallelism compute, save and export what one process does."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdptrain.algo.losses import LOSSES
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.fsdp.checkpoint_folder import CheckpointFolder
from fsdptrain.fsdp.stream import stream_weights
from fsdptrain.types import LogProbs, PackedBatch
from tests import zoo
from tests.exact import Exact
from tests.families import tiny
from tests.sweep import sweep
from tests.tensors import load_files, relative, same
from tests.testing import spawn

from .sharded import full, full_state
from .test_fsdp_backend import GRPO, config, keep_gradients, packs_of_this_rank, samples, scored

TEMPERATURE = 0.9  # of `config`
# A mesh may be this many times as far from the stock model in float64 as the stock model in float32 is. Measured: 1.8.
OF_ROUNDING = 5.0
RESUMED = 1e-5  # of gradients in float32, relative to the largest element of a parameter
ADAM_EPS = 0.01
LOSS_NAMES = ("grpo", "gspo")
# name -> family and changes; else as the zoo has them
FAMILIES: dict[str, tuple[str, dict]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": zoo.VOCAB_SIZE + 1}),  # uneven
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "one expert for two": ("qwen3_moe", {"num_experts": 2}),
    "one expert with biases for two": ("gpt_oss", {"num_local_experts": 2}),
    "norms of heads that the plan forgets": ("phi", {"qk_layernorm": True}),
    "and beside experts": ("glm4_moe", {"use_qk_norm": True}),
}


def tensor(size: int, **more) -> dict:
    return {"tensor_parallel_size": size, **more}


def expert(size: int, **more) -> dict:
    return {"expert_parallel_size": size, **more}


def context(size: int, **more) -> dict:
    return {"context_parallel_size": size, **more}


def copies_of(values: dict) -> int:
    """Ranks that are given the same packs."""
    return values.get("tensor_parallel_size", 1) * values.get("context_parallel_size", 1)


CASES = {
    "qwen3": [
        (2, tensor(2, offload_optimizer=True)),
        (2, context(2, fsdp_cpu_offload=True, load_strategy="rank0")),
        (2, context(2, layout="padded")),
        (4, context(2)),
        (4, context(2, fsdp_replicate_size=2)),
        (4, context(2, tensor_parallel_size=2, gradient_checkpointing=True)),
        (4, tensor(2, gradient_checkpointing=True)),
        (4, tensor(2, fsdp_replicate_size=2)),
    ],
    "tied": [(2, tensor(2)), (4, tensor(2, gradient_checkpointing=True))],
    "gemma3": [(2, tensor(2, layout="padded")), (4, tensor(2)), (2, context(2)), (4, context(2))],
    "qwen3_moe": [
        (2, expert(2, fsdp_prefetch=False, layout="padded")),
        (2, tensor(2, expert_parallel_size=2)),
        (4, tensor(2, expert_parallel_size=2, fsdp_reshard_after_forward=False)),
        (4, expert(2, gradient_checkpointing=True)),
        (2, context(2)),
        (4, context(2)),
        (4, context(2, expert_parallel_size=2)),
        (4, context(2, expert_parallel_size=4)),  # the ranks of experts have different packs
        (4, tensor(2, expert_parallel_size=4)),
        (4, context(2, tensor_parallel_size=2, expert_parallel_size=4)),
        (4, expert(2, fsdp_replicate_size=2)),
        (4, expert(4, offload_optimizer=True)),
    ],
    "gpt_oss": [
        (2, context(2, expert_parallel_size=2)),
        (2, context(2)),
        (4, context(2)),
        (4, context(4)),
        (4, context(2, expert_parallel_size=2)),
        (2, expert(2)),
        (4, expert(2, fsdp_replicate_size=2)),
        (4, expert(4)),
        (4, tensor(2, expert_parallel_size=2)),  # of the attention nothing is split
    ],
    "deepseek_v2": [(2, tensor(2, expert_parallel_size=2)), (4, tensor(2, expert_parallel_size=2))],  # MLA that is
    "deepseek_v3": [
        (2, context(2)),
        (4, context(2)),
        (4, context(2, expert_parallel_size=2)),
        (2, expert(2)),
        (2, tensor(2, expert_parallel_size=2)),
        (4, tensor(2, expert_parallel_size=2)),
        (4, expert(2, fsdp_replicate_size=2)),
        (4, expert(4)),
    ],
    "qwen3_next": [
        (2, expert(2)),
        (2, tensor(2, expert_parallel_size=2)),
        (4, tensor(2, expert_parallel_size=2)),
        (4, expert(2, fsdp_replicate_size=2)),
        (4, expert(4)),
    ],
    "one expert for two": [(4, expert(2))],
    "one expert with biases for two": [(4, expert(2))],
    "norms of heads that the plan forgets": [(2, tensor(2))],
    "and beside experts": [(2, tensor(2, expert_parallel_size=2)), (4, tensor(2, expert_parallel_size=4))],
}

FEW = {  # one or two meshes per class of model, every axis at least once; the rest of CASES is in the matrix
    "qwen3": [(2, context(2, fsdp_cpu_offload=True, load_strategy="rank0")), (2, tensor(2, offload_optimizer=True))],
    "qwen3_moe": [(2, tensor(2, expert_parallel_size=2)), (4, context(2, expert_parallel_size=4))],
    "qwen3_next": [(2, tensor(2, expert_parallel_size=2))],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Family -> its folder, made where it is asked for."""

    def folder(family: str) -> str:
        path = tmp_path_factory.getbasetemp() / f"parallel_{family}"
        if not path.exists():
            name, changes = FAMILIES.get(family, (family, {}))
            tiny(name, **changes).save_pretrained(path)
        return str(path)

    return folder


def made(checkpoint: str, values: dict) -> FSDPBackend:
    return FSDPBackend(config(checkpoint, adam_eps=ADAM_EPS, kl_loss_coef=0.1, **values), total_steps=10)


def learn(checkpoint: str, cases: list[dict], folder: str, of_one: str | None = None) -> list:
    """For each of `cases`: logprobs of one pack; gradients and metrics of a step with each loss, and where there is one
    rank the weights before it; all that was learnt.

    Before, the export must be the checkpoint; after, what was learnt is saved, and exported. Then what one rank has
    learnt, in the folder `of_one`, is loaded: last in the result.
    """
    found = []
    for number, values in enumerate(cases):
        backend = made(checkpoint, values)
        copies = copies_of(values)
        target = Path(folder) / f"{dist.get_world_size()}_{number}"
        assert same(exported(backend, target / "before"), load_files(checkpoint))
        [whole] = packs_of_this_rank(samples(), 4096, dist.get_world_size())
        logprobs = backend.compute_logprobs([whole], "policy")[0].values
        gradients, steps = keep_gradients(backend._optimizer), []
        for name in LOSS_NAMES:
            packs = scored(backend, packs_of_this_rank(samples(), 128, copies), reference=True)
            before = full_state(backend._model) if dist.get_world_size() == 1 else {}
            metrics = backend.train_step(packs, LOSSES[name], GRPO)
            steps.append((dict(gradients), metrics, before))
        CheckpointFolder(target, keep_last=1).write(1, lambda directory, backend=backend: backend.save(directory, 1))
        weights = exported(backend, target / "after")
        assert same(dict(backend.hf_weights()), weights)  # all of it is float32
        assert same(dict(stream_weights(backend.model, dtype=torch.float32, naming="hub", slice_bytes=1)), weights)
        learnt = state(backend)
        found.append((logprobs, steps, learnt, loaded(backend, of_one) if of_one else None))
    return found


def plain(checkpoint: str, weights: list[dict], dtype: torch.dtype) -> tuple[torch.Tensor, list[dict]]:
    """The logprobs, and the gradients of each loss with its `weights`, by the stock model alone, one by one."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    [whole] = packs_of_this_rank(samples(), 4096)
    with Exact() if dtype is torch.float64 else nullcontext():
        found, first = [], one_by_one(model, whole).values.detach()
        for name, state_before in zip(LOSS_NAMES, weights, strict=True):
            model.load_state_dict(state_before, strict=False)
            logprobs = one_by_one(model, whole)
            old = (logprobs.values.detach() + 0.1 * torch.sin(whole.labels.float())) * whole.loss_mask
            batch = replace(whole, old_logprobs=old, ref_logprobs=first)
            model.zero_grad()
            LOSSES[name](batch, logprobs, GRPO).loss.backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return first, found


def both_plain(checkpoint: str, weights: list[dict]) -> list[tuple[torch.Tensor, list[dict]]]:
    return [plain(checkpoint, weights, dtype) for dtype in (torch.float64, torch.float32)]


def stepped(weights: dict, gradients: list[dict]) -> dict:
    """The weights after the steps of `made` with these gradients, by torch in their dtype."""
    options = config("any", adam_eps=ADAM_EPS).optim
    moved = {name: weights[name].to(g.dtype, copy=True).requires_grad_() for name, g in gradients[0].items()}
    adam = torch.optim.AdamW(
        moved.values(), lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps,
        weight_decay=options.weight_decay,
    )  # fmt: skip
    for step in gradients:
        for name, parameter in moved.items():
            parameter.grad = step[name].clone()
        torch.nn.utils.clip_grad_norm_(moved.values(), options.clip_grad)
        adam.step()
    return {name: parameter.detach() for name, parameter in moved.items()}


def errors(found: dict, wanted: dict) -> dict[str, float]:
    """Of each parameter, relative to its largest element."""
    assert found.keys() == wanted.keys()
    return {n: ((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n in wanted}


def allowed(found: list[dict], exact: list[dict]) -> dict[str, float]:
    """Bounds by the kind of a parameter (its name without the number of the layer), from the errors of `found`."""
    bounds: dict[str, float] = {}
    for one, other in zip(found, exact, strict=True):
        for name, error in errors(one, other).items():
            assert math.isfinite(error), name
            rounding = OF_ROUNDING * max(error, torch.finfo(torch.float32).eps)
            bounds[kind(name)] = max(rounding, bounds.get(kind(name), 0.0))
    return bounds


def kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".", name)


def one_by_one(model: PreTrainedModel, batch: PackedBatch) -> LogProbs:
    """Of the labels of each sequence alone; 0 where there is no loss."""
    values, entropies = [], []
    for ids, labels in zip(batch.input_ids.split(batch.seqlens), batch.labels.split(batch.seqlens), strict=True):
        logp = (model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        values.append(logp.gather(1, labels[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return LogProbs(torch.cat(values) * batch.loss_mask, torch.cat(entropies) * batch.loss_mask)


def exported(backend: FSDPBackend, target: Path) -> dict:
    backend.export(target)
    return load_files(target)


def state(backend: FSDPBackend) -> dict:
    """Weights and Adam's state."""
    moments = {f"optimizer.{name}": full(value) for name, value in backend._optimizer.tensors().items()}
    return full_state(backend._model) | moments


def loaded(backend: FSDPBackend, directory: str | Path) -> dict:
    latest = CheckpointFolder(Path(directory), keep_last=1).latest()
    assert latest is not None
    backend.load(latest)
    return state(backend)


def load_each(checkpoint: str, directories: list[Path]) -> list[dict]:
    backend = made(checkpoint, {})
    return [loaded(backend, directory) for directory in directories]


@pytest.mark.matrix
@pytest.mark.parametrize("family", CASES)
def test_split_over_ranks_a_model_computes_learns_saves_and_loads_what_it_does_alone(checkpoints, tmp_path, family):
    require_same_as_alone(checkpoints(family), tmp_path, CASES[family])


@pytest.mark.parametrize("family", FEW)
def test_one_or_two_meshes_of_a_dense_a_moe_and_a_recurrent_model(checkpoints, tmp_path, family):
    require_same_as_alone(checkpoints(family), tmp_path, FEW[family])


def require_same_as_alone(checkpoint: str, tmp_path: Path, meshes: list[tuple[int, dict]]) -> None:
    """A model on each of `meshes` computes, learns, saves and loads what it does on one rank."""
    written = {}
    [[(_, steps, learnt, _)]] = spawn(1, learn, checkpoint, [{}], str(tmp_path))
    [[(logprobs, exact), (rounded_logprobs, rounded)]] = spawn(
        1, both_plain, checkpoint, [before for _, _, before in steps]
    )
    bounds = allowed(rounded, exact)
    rounded_weights, exact_weights = (stepped(steps[0][-1], gradients) for gradients in (rounded, exact))
    weight_bounds = allowed([rounded_weights], [exact_weights])
    logprob_bound = OF_ROUNDING * (rounded_logprobs - logprobs).abs().max()
    for world in sorted({world for world, _ in meshes}):
        cases = [values for size, values in meshes if size == world]
        of_one = str(tmp_path / "1_0")
        for ranks in spawn(world, learn, checkpoint, cases, str(tmp_path), of_one, timeout=300):
            for number, (other_logprobs, other_steps, other_learnt, other_loaded) in enumerate(ranks):
                assert (other_logprobs - logprobs).abs().max() < logprob_bound
                for (gradients, metrics, _), wanted, (_, expected, _) in zip(other_steps, exact, steps, strict=True):
                    found = errors(gradients, wanted)
                    assert {name: error for name, error in found.items() if not error < bounds[kind(name)]} == {}
                    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
                found = errors({name: other_learnt[name] for name in exact_weights}, exact_weights)
                assert {name: error for name, error in found.items() if not error < weight_bounds[kind(name)]} == {}
                others = [name for name in learnt if name not in exact_weights and not name.startswith("optimizer.")]
                assert same({name: other_learnt[name] for name in others}, {name: learnt[name] for name in others})
                assert same(other_loaded, learnt)
                written[tmp_path / f"{world}_{number}"] = other_learnt
    [read] = spawn(1, load_each, checkpoint, list(written))
    assert all(same(found, wanted) for found, wanted in zip(read, written.values(), strict=True))


RESUMES = {
    "tensor to another number of shards": ("qwen3", [(2, tensor(2)), (4, tensor(2))]),
    "context to tensor": ("qwen3", [(4, context(2)), (2, tensor(2))]),
    "both to one": ("qwen3_moe", [(4, tensor(2, expert_parallel_size=4)), (2, expert(2))]),
}


def save(checkpoint: str, directory: str, values: dict) -> dict:
    backend = made(checkpoint, values)
    packs = packs_of_this_rank(samples(), 128, copies_of(values))
    backend.train_step(scored(backend, packs, reference=True), LOSSES["grpo"], GRPO)
    CheckpointFolder(Path(directory), keep_last=1).write(1, lambda folder: backend.save(folder, 1))
    return state(backend)


def resume(checkpoint: str, directory: str, values: dict) -> tuple[dict, dict]:
    """What was loaded, and the gradients of the next step."""
    backend = made(checkpoint, values)
    found, gradients = loaded(backend, directory), keep_gradients(backend._optimizer)
    packs = packs_of_this_rank(samples(seed=1), 128, copies_of(values))
    backend.train_step(scored(backend, packs, reference=True), LOSSES["grpo"], GRPO)
    return found, dict(gradients)


@pytest.mark.matrix  # `require_same_as_alone` resumes between one rank and each mesh, in both directions
@pytest.mark.parametrize("case", RESUMES)
def test_a_checkpoint_of_one_mesh_is_resumed_bitwise_on_another_and_learns_on(checkpoints, tmp_path, case):
    family, [(world, values), (other_world, other_values)] = RESUMES[case]
    [saved, *_] = spawn(world, save, checkpoints(family), str(tmp_path), values)
    [(_, wanted)] = spawn(1, resume, checkpoints(family), str(tmp_path), {})
    for found, gradients in spawn(other_world, resume, checkpoints(family), str(tmp_path), other_values):
        assert same(found, saved)
        assert relative(gradients, wanted) < RESUMED


REFUSED = {  # other refusals: tests/unit, on meta models
    "packed experts": ("qwen3_moe", tensor(2), "shard the experts with --expert-parallel-size"),
    "no experts": ("qwen3", expert(2), "no plan that splits experts"),
    "a state": ("qwen3_next", context(2), "carries a state along the sequence"),
}


def refused(cases: list[tuple[str, dict]]) -> list[str]:
    lines = []
    for checkpoint, values in cases:
        with pytest.raises(ConfigError) as raised:
            made(checkpoint, values)
        lines.append(str(raised.value))
    return lines


def test_a_split_that_the_model_forbids_is_refused_in_one_line_on_every_rank(checkpoints):
    cases = [(checkpoints(family), values) for family, values, _ in REFUSED.values()]
    for lines in spawn(2, refused, cases):
        for line, (_, values, words) in zip(lines, REFUSED.values(), strict=True):
            assert words in line
            assert "\n" not in line
            assert next(iter(values)).replace("_", "-") in line


SWEPT = {
    "expert": {name: "" for name in ("mixtral", "olmoe", "dots1", "hunyuan_v1_moe", "nemotron_h", "lfm2_moe")},
    "tensor": {name: "" for name in ("llama", "gemma4_text", "olmo2", "granitemoe")}
    | {"falcon_h1": "splits 0% of the layers", "gemma3n_text": "drops activations by the mean"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", SWEPT)
def test_other_families_are_exact_or_refused_by_one_line_and_nothing_crashes(tmp_path, mesh):
    for row in sweep([*SWEPT[mesh]], tmp_path, mesh=mesh):
        words = SWEPT[mesh][row.name]
        assert not row.crash, row.name
        assert "\n" not in row.refusal
        assert words in row.refusal
        assert bool(row.refusal) is bool(words), row.refusal
        assert row.refusal or (row.exact and row.exported and row.loaded and row.streamed), row.name
        assert bool(row.beside) is (row.name == "granitemoe")  # its experts are dealt beside
