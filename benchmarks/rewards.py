"""Time to score a rollout: 256 samples with fast rewards and math-verify, 128 with a reward that waits 0.1 s.

    python -m benchmarks.rewards

`--reward-workers 0` scores one sample after the other in the trainer's process.
"""

import statistics
import time
from contextlib import closing

from fsdptrain.config import DataConfig, RewardConfig
from fsdptrain.data.sources import load_rows
from fsdptrain.protocols import RewardFunction
from fsdptrain.rewards.build import build_reward
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.rewards.results import compute_rewards
from fsdptrain.types import Prompt

DATA = "reasoning_gym:gsm_symbolic"
BUILT_IN = ("exact", "format", "reasoning_gym", "math")


def waits(prompt: Prompt, response: str) -> float:
    time.sleep(0.1)
    return 1.0


def rollout_s(reward: RewardFunction, num_workers: int, calls: list[tuple[Prompt, str]], num_rollouts: int) -> float:
    """Return the median time of a rollout, without the first three. [s]"""
    times: list[float] = []
    with closing(ParallelReward(reward, num_workers=num_workers, timeout=300.0, patience=900.0)) as rewards:
        for _ in range(3 + num_rollouts):
            begin = time.perf_counter()
            results = compute_rewards(rewards, [prompt for prompt, _ in calls], [text for _, text in calls])
            times.append(time.perf_counter() - begin)
            assert results.num_unscored == 0, results.first_error
    return statistics.median(times[3:])


def main() -> None:
    rows = load_rows(DataConfig(prompt_data=DATA), seed=0)
    calls: list[tuple[Prompt, str]] = []
    for i in range(256):
        if i % 8 == 0:
            row = rows[i // 8]
            prompt = Prompt(row.id, list(range(150)), str(row.prompt), label=row.label, metadata=row.metadata)
        answer = prompt.label if i % 2 else "7"
        calls.append((prompt, f"<think>{'I think so. ' * 40}</think><answer>{answer}</answer>"))
    print(f"| --reward-workers | {' | '.join(BUILT_IN)} | 0.1 s |", flush=True)
    for num_workers in (0, 1, 2, 8):
        rewards = [build_reward(RewardConfig(reward=[name]), prompt_data=DATA) for name in BUILT_IN]
        cells = [f"{1e3 * rollout_s(reward, num_workers, calls, 15):.1f} ms" for reward in rewards]
        cells.append(f"{rollout_s(waits, num_workers, calls[:128], 1):.2f} s")
        print(f"| {num_workers} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    from benchmarks import rewards  # worker processes cannot import the functions of `__main__`

    rewards.main()
