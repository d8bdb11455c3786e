"""One training step on canned rollouts, fsdptrain against TRL's GRPOTrainer: same model, samples and loss.

    python benchmarks/train_step.py --json results/train_step.json    # minutes on two quiet cores
    python benchmarks/train_step.py --quick                           # seconds: checks agreement, not speed

Each side is a separate process with its own peak memory. Sides alternate, and the median of the ratios within rounds
counts. A step is everything between the samples of a rollout and the new weights: planning, packing or padding,
forward, loss, backward, gradient norm and AdamW (with learning rate 0, so that every round computes the same). It
excludes generation and rewards. Old logprobs are canned too, with noise, so that ratios differ from 1 and some are
clipped. The reference of --kl is a model with other random weights, except with --lora, where it is the policy without
its adapter. Loss and gradient norm of all sides must agree.

    ours      fsdptrain's backend and plan as in a run, with --prefix-sharing
    packed    the same without --prefix-sharing
    stock     TRL's GRPOTrainer on a CPU, which scores every position, prompts and padding included
    compact   the same, scoring completions only, as TRL does on a GPU with Triton
    async     TRL's AsyncGRPOTrainer: packs of --max-tokens that share prefixes, chunked head, entropy always; without a
              GPU its attention kernel is replaced by torch's, one segment at a time

Tokens are those of prompts and completions, counted once even if computed several times. --lengths equal: all
completions have one length and all prompts have one length, the best case for padding. On a GPU, phase times are host
times, and the host runs ahead of the device; the time of the whole step waits for the device. --bf16: the compute dtype
of fsdptrain, and autocast for TRL, both over float32 weights.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from record import TOLERANCES, header, measured, require_agreement, spread, table, write
from step_sides import SIDES, Case, make_samples, our_side, trl_async_side, trl_side
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.testing import tiny_tokenizer

PHASES = ("prepare", "logprobs", "forward", "backward and optimizer")


def work(side: str, case: Case, pipe: Connection) -> None:
    """Run a process of one side: one step per message, until the end message."""
    samples = make_samples(case)
    if side in ("ours", "packed"):
        made = our_side(case, samples, sharing=side == "ours")
    elif side == "async":
        made = trl_async_side(case, samples)
    else:
        made = trl_side(case, samples, compact=side == "compact")
    with ExitStack() as opened:
        try:
            step = opened.enter_context(made)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise
        pipe.send("ready")
        while pipe.recv() != "end":
            pipe.send(measured(step))


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Run the sides in turn, one at a time. Yields the results so far after each round."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers, left_out = [], {}
    for side in case.options.sides:
        pipes[side], theirs = context.Pipe()
        workers.append(context.Process(target=work, args=(side, case, theirs), daemon=True))
        workers[-1].start()
        theirs.close()
        if (said := pipes[side].recv()) != "ready":
            left_out[side] = said
            pipes.pop(side)
    if not pipes:
        sys.exit(f"no side began: {left_out}")
    tokens = sum(len(sample.token_ids) for sample in make_samples(case))
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(case.options.rounds + 1):
        found = {}
        for side in pipes if number % 2 else reversed(pipes):
            pipes[side].send("step")
            found[side] = pipes[side].recv()
        require_agreement(found, TOLERANCES[case.options.bf16], case=case.name)
        print(f"  {case.name}: " + ", ".join(f"{s} {r['wall_s']:.2f} s" for s, r in found.items()), file=sys.stderr)
        if number:  # the first round is a warm-up
            runs.append(found)
            yield {"case": case.name, "tokens": tokens, "left_out": left_out, **summary(runs, tokens), "runs": runs}
    for pipe in pipes.values():
        pipe.send("end")
    for worker in workers:
        worker.join()


def summary(runs: list[dict[str, dict[str, float]]], tokens: int) -> dict[str, Any]:
    """Return medians by side, and the spread of the paired ratios of each other side to `ours`."""
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
    add("--quick", action="store_true", help="a tiny model and one round: checks agreement, not speed")
    add("--json", type=Path, help="path of the report, written after each round")
    add("--sides", nargs="+", choices=SIDES, default=list(SIDES[:4]))
    add("--lengths", nargs="+", choices=("ragged", "equal"), default=["ragged", "equal"])
    add("--vocab", nargs="+", type=int, default=[32_768, 151_936])
    add("--hidden", type=int, default=384)
    add("--layers", type=int, default=4)
    add("--groups", type=int, default=4)
    add("--group-size", type=int, default=8)
    add("--prompt", nargs=2, type=int, default=[30, 500], help="shortest and longest prompt [tokens]")
    add("--completion", type=int, default=120, help="mean completion length [tokens]")
    add("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of completion lengths")
    add("--longest", type=int, default=512, help="longest completion [tokens]")
    add("--micro", type=int, default=4, help="rows per micro-batch of TRL")
    add("--max-tokens", type=int, default=4096, help="size of a pack; TRL pads --micro rows to the longest [tokens]")
    add("--kl", type=float, default=0.0, help="KL coefficient; above 0: with a reference model")
    add("--checkpointing", action="store_true")
    add("--lora", type=int, default=0, metavar="RANK", help="adapter rank; 0: train all weights")
    add("--bf16", action="store_true")
    add("--rounds", type=int, default=5)
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        small = {"vocab": [1000], "hidden": 64, "layers": 2, "groups": 2, "group_size": 4, "prompt": [30, 60]}
        for name, value in {**small, "completion": 20, "longest": 60, "max_tokens": 512, "rounds": 1}.items():
            setattr(options, name, value)
    return options


def save_models(folder: Path, options: argparse.Namespace, vocab: int) -> None:
    """Save policy and reference, with different random weights."""
    for number, name in enumerate(("policy", "reference")):
        torch.manual_seed(options.seed + number)
        save_model(folder / name, options, vocab)


def save_model(folder: Path, options: argparse.Namespace, vocab: int) -> None:
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


def by_phase(row: dict[str, Any]) -> str:
    """Format the seconds of each side, total and by phase, its tokens and its memory, as Markdown."""
    found = []
    for side, medians in row["sides"].items():
        seconds = {f"{name} [s]": medians.get(f"{name}_s") for name in ("wall", *PHASES, "cpu")}
        counted = {"tokens computed": medians["computed_tokens"], "peak [MiB]": medians["peak_mib"]}
        found.append({row["case"]: side, **seconds, **counted})
    return table(found)


def report(begin: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    ragged = [row for row in results if row["case"].startswith("ragged")]

    def worst(key: str) -> float | None:
        found = [row[key]["median"] for row in ragged if key in row]
        return min(found) if found else None

    return {
        **begin,
        "speedup_median": worst("stock_over_ours_wall"),  # smallest gain over the ragged cases
        "speedup_compact_median": worst("compact_over_ours_wall"),
        "peak_memory_ratio": max((row["memory_of_stock"] for row in ragged if "memory_of_stock" in row), default=None),
        "results": results,
    }


def main() -> None:
    options, begin = parsed(), header()
    results: list[dict[str, Any]] = []
    for vocab in options.vocab:
        with tempfile.TemporaryDirectory() as folder:
            save_models(Path(folder), options, vocab)
            for lengths in options.lengths:
                row: dict[str, Any] = {}
                for row in measure(Case(folder, vocab, lengths, options)):
                    write(options.json, report(begin, [*results, row]))  # survives a failure
                results.append(row)
                print(json.dumps({key: value for key, value in row.items() if key != "runs"}))
                print(by_phase(row))
    found = report(begin, results)
    print(json.dumps({key: found[key] for key in ("speedup_median", "speedup_compact_median", "peak_memory_ratio")}))

    if any(row["left_out"] for row in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
