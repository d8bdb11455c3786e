"""Teach a model of 0.1 M parameters to use a calculator: warm-up on conversations, then GRPO on episodes.

    python examples/calculator/train.py [--agent] [--seed 0] [--output-dir runs/calculator]

The task is reasoning-gym's `products` of two-digit numbers, which the model cannot compute itself. The warm-up imitates
two demonstrators: one uses the calculator and is right, one guesses. GRPO learns from the reward alone to use the
calculator. Both stages run the `fsdptrain` command. With `--agent` the episodes are those of an agent of the OpenAI
Agents SDK (agent.py) instead of an environment (calculator.py).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TAGS = ["<tool>", "</tool>", "<answer>", "</answer>"]
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
QUESTION = (
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
)  # as in reasoning-gym
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATA = "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=2&max_digits=2"
BOTH = ["--no-bf16", "--max-tokens-per-gpu", "4096", "--adam-beta2", "0.99"]
WARM_UP = [
    *("--algorithm", "sft", "--label-key", "response", "--lr", "4e-3", "--min-lr", "4e-4", "--lr-warmup-iters", "20"),
    *("--lr-decay-style", "cosine", "--rollout-batch-size", "64", "--eval-interval", "0", "--keep-last", "0"),
]
ENVIRONMENT = ["--environment", "examples.calculator.calculator:Calculator", "--max-turns", "3"]
AGENT = ["--environment", "examples.calculator.agent:run_episode"]
GRPO = [
    *("--prompt-data", DATA, "--data-size", "5000"),
    *("--system-prompt", "", "--reward", "reasoning_gym_strict", "--rollout-max-response-len", "40"),
    *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--lr", "3e-4", "--lr-warmup-iters", "5"),
    *("--global-batch-size", "64", "--eval-size", "128"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a small model to use a calculator.")
    parser.add_argument("--agent", action="store_true", help="train an agent of the OpenAI Agents SDK")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/calculator"))
    parser.add_argument("--warm-up-steps", type=int, default=300)
    parser.add_argument("--rollouts", type=int, default=20)
    args = parser.parse_args()
    folder: Path = args.output_dir
    seeds = ["--seed", str(args.seed), "--rollout-seed", str(args.seed)]
    save_start(folder / "start", args.seed)
    demonstrations = write_demonstrations(
        folder / "demonstrations.jsonl", Random(args.seed), count=20_000, agent=args.agent
    )

    warm_up = ["--hf-checkpoint", str(folder / "start"), "--prompt-data", str(demonstrations)]
    run([*warm_up, *WARM_UP, *BOTH, *seeds, "--num-rollout", str(args.warm_up_steps)], folder / "sft")
    grpo = [*(AGENT if args.agent else ENVIRONMENT), "--eval-interval", str(args.rollouts)]
    grpo += ["--hf-checkpoint", str(folder / "sft" / "hf")]
    run([*grpo, *GRPO, *BOTH, *seeds, "--num-rollout", str(args.rollouts)], folder / "grpo")
    for name in ("eval/heldout/accuracy", "episode/several_turns_fraction"):
        values = [row[name] for row in read(folder / "grpo" / "metrics.jsonl") if name in row]
        print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")


def save_start(target: Path, seed: int) -> None:
    """Write an untrained Qwen3 whose tokens are characters, tags, and the two halves of the question."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*TAGS, *CALL, *QUESTION]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", chat_template=TEMPLATE, model_max_length=128
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)


def write_demonstrations(target: Path, rng: Random, *, count: int, agent: bool = False) -> Path:
    """Write demonstrations, half of which use the calculator and half of which guess.

    A response is a list of messages, with tool messages between the assistant's turns; only these have a loss.

    agent: write tool calls as an agent expects them, in JSON
    """
    call = CALL if agent else TAGS[:2]
    with target.open("w") as file:
        for _ in range(count):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            turns = asks(a, b, call) if rng.random() < 0.5 else guesses(rng)
            row = {"prompt": f"{a} * {b}".join(QUESTION), "response": turns}
            file.write(json.dumps(row) + "\n")
    return target


def asks(a: int, b: int, call: Sequence[str]) -> list[dict[str, str]]:
    result = str(a * b)
    return [say(f"{a} * {b}".join(call)), {"role": "tool", "content": result}, say(f"<answer>{result}</answer>")]


def guesses(rng: Random) -> list[dict[str, str]]:
    return [say(f"<answer>{rng.randint(10, 99) * rng.randint(10, 99)}</answer>")]


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def run(flags: list[str], output_dir: Path) -> None:
    command = [*flags, "--output-dir", str(output_dir)]
    print("\n$ fsdptrain " + shlex.join(command), flush=True)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    subprocess.run([sys.executable, "-m", "fsdptrain", *command], check=True, env=environment)


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
