"""One training step with --backend megatron against --backend fsdp: same model, samples and loss.

    python benchmarks/backends.py --json benchmarks/results/backends.json    # minutes on two quiet cores
    python benchmarks/backends.py --quick                                    # seconds: checks that it runs and agrees

Each side has its own one or two processes. Sides alternate within a round, and the median of the ratios within rounds
counts. A step is planning, packing, forward, loss, backward, gradient norm and AdamW with learning rate 0, so that
every round computes the same: the loss and the norm of all sides must agree. The time is that of the slowest rank.
Memory is the peak of the whole process, torch and libraries included, on the rank that needs most.

Without Transformer Engine, megatron-core computes padded rows while --backend fsdp packs; `--lengths equal` removes
this difference. Ratios are relative to the first side of each case.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import TOLERANCES, header, measured, require_agreement, spread, table, write

from fsdptrain.types import Sample
from tests.testing import free_port, rank_variables, tiny_tokenizer

MEGATRON = {"backend": "megatron"}


class Case(NamedTuple):
    """One model on some processes, and the flags of each side."""

    model: str  # dense or experts
    num_ranks: int
    sides: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.model}, {self.num_ranks} process{'es' if self.num_ranks > 1 else ''}"


CASES = (
    Case("dense", 1, {"fsdp": {}, "megatron": MEGATRON}),
    Case("experts", 1, {"fsdp": {}, "megatron": MEGATRON}),
    Case(
        "dense",
        2,
        {
            "fsdp": {},
            "megatron, data": MEGATRON,
            "megatron, tensor": MEGATRON | {"megatron_tensor_parallel": 2},
            "megatron, pipeline": MEGATRON | {"megatron_pipeline_parallel": 2},
        },
    ),
    Case(
        "experts",
        2,
        {
            "fsdp": {},
            "fsdp, experts": {"expert_parallel_size": 2},
            "megatron, experts": MEGATRON | {"megatron_expert_parallel": 2},
        },
    ),
)


def make_samples(options: argparse.Namespace) -> list[Sample]:
    draw = random.Random(options.seed)
    samples = []
    for number in range(options.samples):
        shortest = options.longest if options.lengths == "equal" else options.longest // 8
        length = draw.randint(shortest, options.longest)
        tokens = [draw.randrange(options.vocab) for _ in range(length)]
        mask = [False] * (length // 4) + [True] * (length - length // 4)
        advantage = draw.uniform(-1, 1)
        samples.append(Sample(str(number), tokens, mask, [0.0] * length, reward=advantage, advantage=advantage))
    return samples


def serve(flags: dict[str, Any], folder: str, options: argparse.Namespace, variables: dict[str, str], pipe: Connection):
    """Run one rank of one side: one step per message, until the end message."""
    os.environ |= variables
    torch.set_num_threads(1)
    from fsdptrain import Config
    from fsdptrain.algo.losses import LOSSES
    from fsdptrain.platform import process_group
    from fsdptrain.trainer.backend import build_backend
    from fsdptrain.trainer.batches import PackingRules, make_batches
    from fsdptrain.types import LossConfig

    config = Config(
        hf_checkpoint=folder,
        bf16=options.bf16,
        lr=0.0,
        clip_grad=0.0,
        max_tokens_per_gpu=options.max_tokens,
        rollout_max_response_len=options.longest,
        **flags,
    )
    with process_group(600):
        backend = build_backend(config)
        rules = PackingRules.of(config, layout=backend.layout_probe.layout)
        samples = make_samples(options) if variables["RANK"] == "0" else []

        def step() -> dict[str, float]:
            (batches,) = make_batches(samples, rules, rollout=0)
            metrics = backend.train_step(batches.packs, LOSSES["grpo"], LossConfig())
            return {"loss": metrics["loss/total"], "grad_norm": metrics["optim/grad_norm"]}

        pipe.send("ready")
        while pipe.recv() == "step":
            pipe.send(measured(step))


class Side:
    """The processes of one side."""

    def __init__(self, flags: dict[str, Any], case: Case, folder: str, options: argparse.Namespace) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(case.num_ranks):
            ours, theirs = context.Pipe()
            variables = rank_variables(rank, case.num_ranks, port)
            process = context.Process(target=serve, args=(flags, folder, options, variables, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        assert self._answers() == ["ready"] * case.num_ranks

    def step(self) -> dict[str, float]:
        """Run a step. Returns the slowest rank's time, the largest rank's memory, and the CPU time of all ranks."""
        for pipe in self._pipes:
            pipe.send("step")
        found = self._answers()
        largest = {name: max(one[name] for one in found) for name in ("wall_s", "peak_mib", "loss", "grad_norm")}
        return {**largest, "cpu_s": sum(one["cpu_s"] for one in found)}

    def _answers(self) -> list[Any]:
        """Return the answers by rank. Exits as soon as a rank has died: ranks waiting for it would never answer."""
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            for pipe in wait([p for rank, p in enumerate(self._pipes) if rank not in found]):
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    sys.exit(f"rank {rank} has died; what it said is above")
        return [found[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join()


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn, one at a time."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, case.model, options)
        sides = {name: Side(flags, case, folder, options) for name, flags in case.sides.items()}
        runs = []
        for number in range(options.rounds + 1):
            order = list(sides) if number % 2 else list(reversed(sides))
            found = {name: sides[name].step() for name in order}
            require_agreement(found, TOLERANCES[options.bf16], case=case.name)
            runs += [found] if number else []  # the first round is a warm-up
            print(f"  {case.name}: " + ", ".join(f"{n} {r['wall_s']:.2f} s" for n, r in found.items()), file=sys.stderr)
        for side in sides.values():
            side.end()
    tokens = sum(len(sample.token_ids) for sample in make_samples(options))
    return {"case": case.name, "tokens": tokens, "sides": summary(runs, list(case.sides), tokens), "runs": runs}


def summary(runs: list[dict[str, dict[str, float]]], sides: list[str], tokens: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each side, and the paired ratios of its time to that of the first side."""
    found = {}
    for side in sides:
        wall = statistics.median(run[side]["wall_s"] for run in runs)
        found[side] = {
            "wall_s": round(wall, 4),
            "cpu_s": round(statistics.median(run[side]["cpu_s"] for run in runs), 4),
            "tokens_per_s": round(tokens / wall, 1),
            "peak_mib": round(max(run[side]["peak_mib"] for run in runs)),
            "wall_of_first": spread(run[side]["wall_s"] / run[sides[0]]["wall_s"] for run in runs),
            "cpu_of_first": spread(run[side]["cpu_s"] / run[sides[0]]["cpu_s"] for run in runs),
        }
    return found


def save_model(folder: str, kind: str, options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(options.seed)
    sizes: dict[str, Any] = {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 32,
        "num_key_value_heads": options.hidden // 64,
        "head_dim": 32,
        "intermediate_size": 3 * options.hidden,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": options.hidden}
    chosen = Qwen3Config(**sizes) if kind == "dense" else Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)
    AutoModelForCausalLM.from_config(chosen, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model and one round: checks agreement, not speed")
    add("--json", type=Path, help="path of the report")
    add("--cases", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    add("--lengths", choices=("ragged", "equal"), default="ragged")
    add("--samples", type=int, default=32)
    add("--longest", type=int, default=256, help="longest sample; the shortest is an eighth of it [tokens]")
    add("--max-tokens", type=int, default=2048, help="size of a pack [tokens]")
    add("--vocab", type=int, default=8192)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--rounds", type=int, default=7)
    add("--bf16", action="store_true")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        small = {"samples": 6, "longest": 32, "max_tokens": 96, "vocab": 263, "hidden": 128, "layers": 2, "rounds": 1}
        vars(options).update(small)
    return options


def main() -> None:
    options, begin = parsed(), header()
    results = [measure(case, options) for case in CASES if case.name in options.cases]
    write(options.json, {**begin, "results": results})
    rows = [
        {"case": found["case"], "side": name, **side, **{k: json.dumps(v) for k, v in side.items() if "_of_" in k}}
        for found in results
        for name, side in found["sides"].items()
    ]
    print(table(rows), end="")


if __name__ == "__main__":
    main()
