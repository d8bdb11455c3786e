"""One training step on canned rollouts, ours against TRL's GRPOTrainer: same model, same samples, same loss.

    python benchmarks/train_step.py --json results/train_step.json    # minutes on two quiet cores
    python benchmarks/train_step.py --quick                           # seconds: that it runs and agrees, not how fast

Each side is a process of its own, so that its peak of memory is its own; they take turns, and the median of the ratios
of a round counts. A step is all that happens between the samples of a rollout and the new weights: planning, packing or
padding, forward, loss, backward, the gradient's norm and AdamW (its learning rate is 0, so that every round computes
the same). Generation is no part of it, nor are rewards. Loss and gradient norm of all sides must agree.

    ours      fsdptrain's backend and plan, as a run has them
    packed    the same with --prefix-sharing off
    stock     TRL's GRPOTrainer on a CPU, which scores every position, prompts and padding too
    compact   the same, scoring completions only, as TRL does on a GPU with Triton

Tokens are those of prompts and completions, however often they are computed. --lengths equal: completions and prompts
of one length each, the best case of padding. On a GPU the phases are those of the host, which runs ahead of the device;
the whole step is waited for. --bf16: our compute dtype, and autocast for TRL, both over float32 weights.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from record import header, peak_mib, spread, start_peak, write
from traced import draw, longest, parts
from transformers import Qwen3Config, Qwen3ForCausalLM

from fsdptrain.testing import tiny_tokenizer
from fsdptrain.types import Sample

SIDES = ("ours", "packed", "stock", "compact")
TOLERANCES = {False: 1e-4, True: 5e-2}  # relative, of loss and gradient norm: float32, added up in other orders; bf16
Step = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Case:
    """One model and one rollout."""

    folder: str  # of the model
    vocab: int
    lengths: str  # ragged, equal
    options: argparse.Namespace

    @property
    def name(self) -> str:
        return f"{self.lengths}, vocabulary {self.vocab}"


def make_samples(case: Case) -> list[Sample]:
    """Groups of one prompt each; lognormal lengths of completions, uniform ones of prompts."""
    options, draw = case.options, random.Random(case.options.seed)
    shortest, longest = options.prompt
    mu = math.log(options.completion) - options.sigma**2 / 2
    samples = []
    for group in range(options.groups):
        width = (shortest + longest) // 2 if case.lengths == "equal" else draw.randint(shortest, longest)
        prompt = [draw.randrange(case.vocab) for _ in range(width)]
        rewards = [float(draw.randrange(2)) for _ in range(options.group_size)]
        mean = statistics.fmean(rewards)
        for reward in rewards:
            length = options.completion
            if case.lengths == "ragged":
                length = min(options.longest, max(1, round(draw.lognormvariate(mu, options.sigma))))
            tokens = [*prompt, *(draw.randrange(case.vocab) for _ in range(length))]
            mask = [False] * width + [True] * length
            samples.append(Sample(str(group), tokens, mask, [0.0] * len(mask), reward=reward, advantage=reward - mean))
    return samples


class Phases:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def __call__(self, name: str) -> None:
        """What ran since the last call was `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now


@contextmanager
def our_side(case: Case, samples: list[Sample], *, sharing: str) -> Iterator[Step]:
    from fsdptrain import Config
    from fsdptrain.algo.losses import LOSSES
    from fsdptrain.backends.fsdp import FSDPBackend
    from fsdptrain.platform import process_group
    from fsdptrain.trainer.batches import PackingRules, make_batches
    from fsdptrain.trainer.scoring import Scorer
    from fsdptrain.types import LossConfig, LossOutput

    options = case.options
    config = Config(
        hf_checkpoint=case.folder,
        bf16=options.bf16,
        lr=0.0,
        clip_grad=0.0,
        max_tokens_per_gpu=options.max_tokens,
        rollout_max_response_len=options.longest,
        gradient_checkpointing=options.checkpointing,
        kl_loss_coef=options.kl,
        prefix_sharing=sharing,
    )
    with process_group(600):
        backend = FSDPBackend(config, total_steps=10**6)
        layout = backend.layout_probe.layout
        rules = PackingRules.of(config, layout=layout, shares_prefixes=backend.shares_prefixes)

        def step() -> dict[str, float]:
            phases = Phases()

            def loss(*args: Any) -> LossOutput:
                phases("forward")
                return LOSSES["grpo"](*args)

            (batches,) = make_batches(samples, rules, rollout=0)
            phases("prepare")
            (batches,) = Scorer(config, backend).score([batches])
            phases("score")
            hook = backend.model.register_forward_pre_hook(lambda *_: phases("backward and optimizer"))
            metrics = backend.train_step(batches.packs, loss, LossConfig(kl_loss_coef=options.kl))
            hook.remove()
            phases("backward and optimizer")
            computed = sum(p.num_tokens if p.shared is None else p.shared.num_tokens for p in batches.packs)
            return {
                "loss": metrics["loss/total"],
                "grad_norm": metrics["optim/grad_norm"],
                "computed_tokens": computed,
                **{f"{name}_s": seconds for name, seconds in phases.seconds.items()},
            }

        yield step


@contextmanager
def trl_side(case: Case, samples: list[Sample], *, compact: bool) -> Iterator[Step]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it would say that rollout_func may change
    import trl
    import trl.trainer.utils
    from datasets import Dataset

    if compact:
        trl.trainer.utils._use_triton = lambda _: True  # asked in one place: whether to score completions only
    options = case.options

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        split = [sample.loss_mask.index(True) for sample in samples]
        assert len(prompts) == len(samples)
        return {
            "prompt_ids": [s.token_ids[:at] for s, at in zip(samples, split, strict=True)],
            "completion_ids": [s.token_ids[at:] for s, at in zip(samples, split, strict=True)],
            "logprobs": None,
        }

    num_micro = len(samples) // options.micro
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(case.folder, dtype=torch.float32),
            reward_funcs=lambda number, **_: [samples[i].reward for i in number],
            args=trl.GRPOConfig(
                output_dir=folder,
                loss_type="dapo",
                scale_rewards="none",
                beta=options.kl,
                use_bias_correction_kl=False,
                max_completion_length=options.longest,
                num_generations=options.group_size,
                per_device_train_batch_size=options.micro,
                gradient_accumulation_steps=num_micro,
                use_cpu=not torch.cuda.is_available(),
                bf16=options.bf16,
                report_to="none",
                activation_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [""] * len(samples)}),
            processing_class=tiny_tokenizer(),
            rollout_func=rollout,
        )
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = num_micro  # transformers' loop sets it
    trainer.model.train()
    if options.checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)  # its default too

    def step() -> dict[str, float]:
        phases, value = Phases(), 0.0
        for trainer._step in range(num_micro):
            inputs = trainer._prepare_inputs([{"prompt": "", "number": number} for number in range(len(samples))])
            phases("prepare")  # the first call pads, shuffles and, with a KL term, scores
            with torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=options.bf16):
                loss = trainer._compute_loss(trainer.model, inputs)
            phases("forward")
            loss.backward()
            value += loss.item()
            phases("backward and optimizer")
        width = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        phases("backward and optimizer")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        return {"loss": value, "grad_norm": norm.item(), "computed_tokens": width * len(samples), **seconds}

    yield step


def work(side: str, case: Case, pipe: Connection) -> None:
    """A process of one side: a step for each message, until there are no more."""
    samples = make_samples(case)
    if side in ("ours", "packed"):
        made = our_side(case, samples, sharing="auto" if side == "ours" else "off")
    else:
        made = trl_side(case, samples, compact=side == "compact")
    with made as step:
        pipe.send("ready")
        while (wanted := pipe.recv()) != "end":
            if wanted == "trace":
                with torch.profiler.profile() as tracer:
                    step()
                pipe.send({"parts": parts(tracer), "operations": longest(tracer)})
                continue
            start_peak()
            wall, cpu = time.perf_counter(), time.process_time()
            found = step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found |= {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "peak_mib": peak_mib()}
            pipe.send(found)


def measure(case: Case) -> dict[str, Any]:
    """All sides in turn, one process at a time at work."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    for side in case.options.sides:
        pipes[side], theirs = context.Pipe()
        workers.append(context.Process(target=work, args=(side, case, theirs), daemon=True))
        workers[-1].start()
        theirs.close()
        assert pipes[side].recv() == "ready"
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(case.options.rounds + 1):
        found = {}
        for side in case.options.sides if number % 2 else reversed(case.options.sides):
            pipes[side].send("step")
            found[side] = pipes[side].recv()
        require_agreement(found, TOLERANCES[case.options.bf16])
        if number:  # the first warms up
            runs.append(found)
        print(f"  {case.name}: " + ", ".join(f"{s} {r['wall_s']:.2f} s" for s, r in found.items()), file=sys.stderr)
    profile = {}
    if case.options.profile and "ours" in pipes:
        pipes["ours"].send("trace")
        profile = {"profile": pipes["ours"].recv()}
    for pipe in pipes.values():
        pipe.send("end")
    for worker in workers:
        worker.join()
    tokens = sum(len(sample.token_ids) for sample in make_samples(case))
    return {"case": case.name, "tokens": tokens, **summary(runs, tokens), **profile, "runs": runs}


def require_agreement(found: dict[str, dict[str, float]], tolerance: float) -> None:
    for name in ("loss", "grad_norm"):
        values = {side: run[name] for side, run in found.items()}
        low, high = min(values.values()), max(values.values())
        if not all(map(math.isfinite, values.values())) or not high - low <= tolerance * max(abs(low), abs(high), 1e-2):
            sys.exit(f"the sides do not agree: {name} is {values}")


def summary(runs: list[dict[str, dict[str, float]]], tokens: int) -> dict[str, Any]:
    """Medians by side, and of `ours` against each other side the median, least and most of the paired ratios."""
    sides = list(runs[0])
    result: dict[str, Any] = {"sides": {}}
    for side in sides:
        phases = sorted({name for run in runs for name in run[side] if name.endswith("_s")})
        medians = {name: round(statistics.median(run[side].get(name, 0.0) for run in runs), 3) for name in phases}
        result["sides"][side] = {
            "tokens_per_s": round(tokens / medians["wall_s"], 1),
            "computed_tokens": runs[0][side]["computed_tokens"],
            "peak_mib": round(max(run[side]["peak_mib"] for run in runs)),
            **medians,
        }
    for side in [side for side in sides if "ours" in sides and side != "ours"]:
        for clock in ("wall", "cpu"):
            ratios = [run[side][f"{clock}_s"] / run["ours"][f"{clock}_s"] for run in runs]
            result[f"{side}_over_ours_{clock}"] = spread(ratios)
        result[f"memory_of_{side}"] = round(result["sides"]["ours"]["peak_mib"] / result["sides"][side]["peak_mib"], 3)
    return result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one round; whether it runs and agrees")
    add("--json", type=Path, help="write the report to this file")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add("--lengths", nargs="+", choices=("ragged", "equal"), default=["ragged", "equal"])
    add("--vocab", nargs="+", type=int, default=[32_768, 151_936])
    add("--hidden", type=int, default=384)
    add("--layers", type=int, default=4)
    add("--groups", type=int, default=4)
    add("--group-size", type=int, default=8)
    add("--prompt", nargs=2, type=int, default=[30, 500], help="shortest and longest [tokens]")
    add("--completion", type=int, default=120, help="mean length [tokens]")
    add("--sigma", type=float, default=0.8, help="of the logarithm of lengths")
    add("--longest", type=int, default=512, help="completion [tokens]")
    add("--micro", type=int, default=4, help="rows of a micro-batch of TRL")
    add("--max-tokens", type=int, default=4096, help="of a pack of ours: as many as --micro rows of TRL have")
    add("--kl", type=float, default=0.0, help="above 0: with a reference model, which is scored too")
    add("--checkpointing", action="store_true")
    add("--bf16", action="store_true")
    add("--rounds", type=int, default=5)
    add("--profile", action="store_true", help="trace one more step of ours, and draw its parts beside --json")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        small = {"vocab": [1000], "hidden": 64, "layers": 2, "groups": 2, "group_size": 4, "prompt": [30, 60]}
        for name, value in {**small, "completion": 20, "longest": 60, "max_tokens": 512, "rounds": 1}.items():
            setattr(options, name, value)
    return options


def save_model(folder: str, options: argparse.Namespace, vocab: int) -> None:
    torch.manual_seed(options.seed)
    heads = max(2, options.hidden // 64)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=options.hidden // heads,
            intermediate_size=3 * options.hidden,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def main() -> None:
    options, begin = parsed(), header()
    results = []
    for vocab in options.vocab:
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, options, vocab)
            for lengths in options.lengths:
                results.append(measure(Case(folder, vocab, lengths, options)))
                print(json.dumps({key: value for key, value in results[-1].items() if key != "runs"}))
    ragged = [row for row in results if row["case"].startswith("ragged")] or results

    def worst(key: str) -> float | None:
        found = [row[key]["median"] for row in ragged if key in row]
        return min(found) if found else None

    report = {
        **begin,
        "speedup_median": worst("stock_over_ours_wall"),  # of the ragged cases the one that gains least
        "speedup_compact_median": worst("compact_over_ours_wall"),
        "peak_memory_ratio": max((row["memory_of_stock"] for row in ragged if "memory_of_stock" in row), default=None),
        "results": results,
    }
    write(options.json, report)
    shares = {row["case"]: row["profile"]["parts"] for row in results if "profile" in row}
    if shares and options.json:
        draw(options.json.with_suffix(".png"), shares, "a training step of ours")
    print(json.dumps({key: report[key] for key in ("speedup_median", "speedup_compact_median", "peak_memory_ratio")}))


if __name__ == "__main__":
    main()
