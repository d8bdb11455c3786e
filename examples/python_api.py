"""Train from Python: a reward function, data, a callback, and the result.

    fsdptrain demo                                                           # makes a tiny model, on a CPU
    python examples/python_api.py runs/quickstart/sft/hf runs/python_api     # half a minute
    python examples/python_api.py Qwen/Qwen3-0.6B runs/python_api            # on a GPU

Keyword arguments of `Config` are the flags of the command line, with underscores.
"""

import sys

from fsdptrain import Callback, Config, Trainer

WORDS = ["planet", "garden", "winter", "silver", "candle", "forest", "bridge", "rocket", "market", "island", "summer"]
ROWS = [
    {"prompt": f"Spell this word backward (example: sun -> nus): {word}", "label": word[::-1]}
    for word in [*WORDS, *(word[:4] for word in WORDS), *(word[1:] for word in WORDS)]
]


def spelled(prompt, response: str) -> float:
    """Reward of one response: 1 if it ends with the wanted word, in a tag or not."""
    return float(response.strip().removesuffix("</answer>").strip().endswith(prompt.label))


class StopWhenGood(Callback):
    def on_step(self, trainer: Trainer, metrics) -> None:
        if metrics["reward/mean"] > 0.95:
            trainer.stop("the reward is above 0.95")


def main(hf_checkpoint: str, output_dir: str, **flags: object) -> None:
    config = Config(
        hf_checkpoint=hf_checkpoint,
        output_dir=output_dir,
        lr=2e-4 if "quickstart" in hf_checkpoint else 1e-6,  # a tiny model needs more
        **{"num_rollout": 20, "rollout_batch_size": 16, "rollout_max_response_len": 64, "eval_size": 8, **flags},
    )
    print(config)  # what differs from the defaults
    question = ROWS[0]["prompt"]
    with Trainer(config, reward=spelled, dataset=ROWS, callbacks=[StopWhenGood()]) as trainer:
        print("before:", trainer.generate(question, num_samples=4))
        result = trainer.fit()
        print("after:", trainer.generate(question, num_samples=4))
        print("held out:", trainer.evaluate())
    print(result)
    print(result.history[["reward/mean", "completion/length_mean"]])  # a pandas table, one row per step


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL OUTPUT_DIR")
    main(*sys.argv[1:])
