"""A custom reward and custom data: a function and a list of rows.

    python examples/custom_reward.py Qwen/Qwen3-0.6B runs/custom_reward

On the command line, in the folder of this repository, use it as `--reward examples.custom_reward:brevity`.
"""

import sys

from fsdptrain import Config, Trainer
from fsdptrain.types import Prompt

ROWS = [{"prompt": f"Say the number {n} in words.", "label": str(n)} for n in range(64)]


def brevity(prompt: Prompt, response: str) -> dict[str, float]:
    """Reward short answers without digits. Values of a mapping are summed, and each is logged under its name."""
    return {"short": max(0.0, 1.0 - len(response) / 200), "no_digits": float(prompt.label not in response)}


def main(hf_checkpoint: str, output_dir: str, **flags: object) -> None:
    config = Config(
        hf_checkpoint=hf_checkpoint,
        output_dir=output_dir,
        pass_threshold=1.5,  # of at most 2: the reward of a correct answer
        **{"num_rollout": 20, "rollout_batch_size": 16, "rollout_max_response_len": 64, **flags},
    )
    Trainer(config, reward=brevity, dataset=ROWS).fit()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL OUTPUT_DIR")
    main(*sys.argv[1:])
