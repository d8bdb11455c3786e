"""Train from Python: a reward function, data, a callback, and the result.

python examples/python_api.py Qwen/Qwen3-0.6B runs/python_api

Keyword arguments of `Config` are the flags of the command line, with underscores.
"""

import sys

from fsdptrain import Callback, Config, Trainer

ROWS = [{"prompt": f"Name a fruit that begins with the letter {letter}.", "label": letter} for letter in "abcdefgklmop"]


def first_letter(prompt, response: str) -> float:
    """Reward of one response: its first letter is the wanted one, and it is short."""
    return float(response.strip().lower().startswith(prompt.label)) - 0.001 * len(response)


class StopWhenGood(Callback):
    def on_step(self, trainer: Trainer, metrics) -> None:
        if metrics["reward/mean"] > 0.95:
            trainer.stop("the reward is above 0.95")


def main(hf_checkpoint: str, output_dir: str, **flags: object) -> None:
    config = Config(
        hf_checkpoint=hf_checkpoint,
        output_dir=output_dir,
        **{"num_rollout": 20, "rollout_batch_size": 8, "rollout_max_response_len": 64, "eval_size": 2, **flags},
    )
    print(config)  # what differs from the defaults
    with Trainer(config, reward=first_letter, dataset=ROWS, callbacks=[StopWhenGood()]) as trainer:
        print("before:", trainer.generate("Name a fruit that begins with the letter b.")[0])
        result = trainer.fit()
        print("after:", trainer.generate("Name a fruit that begins with the letter b.")[0])
    print(result)
    print(result.history[["reward/mean", "completion/length_mean"]])  # a pandas table, one row per step
    print(result.evaluation)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL OUTPUT_DIR")
    main(*sys.argv[1:])
