"""--record-rollouts writes what each step trains on; --replay-rollouts trains on it again, without an engine.

The folder `step_00000012` holds the rollout of step 12. It gets this name when it is complete.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdptrain.checkpoints import step_of
from fsdptrain.config import Config
from fsdptrain.config.keys import all_keys
from fsdptrain.data.packing.sample_index import prompt_length
from fsdptrain.distributed import raise_on_all_ranks
from fsdptrain.errors import DataError, RolloutError
from fsdptrain.rewards.parallel import RewardResults
from fsdptrain.rewards.values import RewardResult
from fsdptrain.trainer.run_dir import RunFolder
from fsdptrain.trainer.samples.selection import joined, only
from fsdptrain.trainer.samples.single_turn import GenerationRound
from fsdptrain.trainer.samples.source import RolloutBatch, RolloutSource, own_share
from fsdptrain.types import Prompt, Sample

log = logging.getLogger(__name__)

_FACTS, _SAMPLES, _STEPS = "rollout.json", "rank_{}.parquet", f"step_{8 * '[0-9]'}"
_OPTIONS = (  # what a recording depends on and a replay does not compute
    "n_samples_per_prompt", "rollout_batch_size", "rollout_temperature", "rollout_top_p", "rollout_top_k",
    "rollout_min_p", "dynamic_sampling", "max_staleness", "overlong_penalty", "overlong_buffer",
)  # fmt: skip
_INPUTS = ("rows of --prompt-data", "chat template", "tokenizer")
_SAME = (  # fields of `Sample` that are columns
    "group_id", "token_ids", "loss_mask", "token_weights", "rollout_logprobs", "reward", "policy_version", "versions",
    "truncated",
)  # fmt: skip


@dataclass
class RecordingSource:
    """Writes the rollouts of `source`, each rank its samples, after shaping and before advantages."""

    source: RolloutSource
    folder: Path
    bound: Mapping[str, Any]  # options and digests of inputs

    def __getattr__(self, name: str) -> Any:  # in_flight, run_ahead
        return getattr(self.source, name)

    def collect(self, step: int) -> RolloutBatch:
        rollout, stream = self.source.collect(step), self.source.stream
        target = self.folder / f"step_{step + 1:08d}"
        unfinished = target.with_name(f".{target.name}")
        with raise_on_all_ranks(RolloutError, f"--record-rollouts: {target}"):
            unfinished.mkdir(parents=True, exist_ok=True)
            write_samples(unfinished / _SAMPLES.format(dist.get_rank()), rollout.samples, stream.tokenizer)
        with raise_on_all_ranks(RolloutError, f"--record-rollouts: {target}"):
            if dist.get_rank() == 0:  # the files of all ranks are complete
                facts = {"num_ranks": dist.get_world_size(), "stream": stream.state_dict(), "metrics": rollout.metrics}
                (unfinished / _FACTS).write_text(json.dumps({"bound": self.bound, **facts}))
                for later in [path for path in self.folder.glob(_STEPS) if step_of(path) > step]:
                    shutil.rmtree(later)  # of before a resume
                unfinished.rename(target)
        return rollout


class ReplaySource(RecordingSource):
    """Reads the rollouts in `folder`. On as many ranks as wrote them, each reads its own samples."""

    def collect(self, step: int) -> RolloutBatch:
        folder = self.folder / f"step_{step + 1:08d}"
        with raise_on_all_ranks(DataError, f"--replay-rollouts: {folder}"):
            facts = json.loads((folder / _FACTS).read_text())
            self.source.stream.load_state_dict(facts["stream"])
            if facts["num_ranks"] == dist.get_world_size():
                generated = read_samples(folder / _SAMPLES.format(dist.get_rank()))
            else:
                whole = joined([read_samples(folder / _SAMPLES.format(rank)) for rank in range(facts["num_ranks"])])
                groups = dict.fromkeys(sample.group_id for sample in whole.samples)
                generated = only({*own_share([*groups])}, whole)
        source = replace(self.source, shaping=None)  # the recorded rewards are shaped
        return source.batch(generated, images={}, seconds={}, metrics=facts["metrics"])


def open_recorded(config: Config, folder: RunFolder) -> Callable[[Any], RecordingSource]:
    """Return what wraps the source of samples: for --replay-rollouts, or for --record-rollouts into the run's folder.

    Raises DataError if a step is missing or was recorded with other options or inputs. Collective.
    """
    options = {all_keys()[flat].flag: config.value(flat) for flat in _OPTIONS}
    bound = options | {name: folder.inputs[name] for name in _INPUTS if name in folder.inputs}
    if config.run.replay_rollouts is None:
        return partial(RecordingSource, folder=folder.path / "rollouts", bound=bound)
    recorded, last = Path(config.run.replay_rollouts), config.run.num_rollout
    where = f"--replay-rollouts {recorded}"
    with raise_on_all_ranks(DataError, where):
        found = {step_of(path): path / _FACTS for path in sorted(recorded.glob(_STEPS))}
        for number in range((folder.resumed_step or 0) + 1, last + 1):
            if number not in found:
                there = f"steps {min(found)} to {max(found)}" if found else "none: name the folder rollouts of a run"
                raise DataError(f"{where} lacks step {number} of --num-rollout {last}, has {there}")
            then = json.loads(found[number].read_text())["bound"]
            changed = {name: now for name, now in bound.items() if then.get(name, now) != now}
            others = [f"other {x}" if x in _INPUTS else f"{x} {then[x]}, not {now}" for x, now in changed.items()]
            if others:
                line = f"step {number} was recorded with {' and '.join(others)}: replay it with these"
                raise DataError(f"{where}: {line}")
    if config.evaluates:
        log.warning("--replay-rollouts: there is no engine, so nothing is evaluated")
    return partial(ReplaySource, folder=recorded, bound=bound)


def write_samples(path: Path, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a row for each sequence; no advantages, which a replay computes, and no errors, which may hold secrets."""
    numbered = [(number, each) for number, sample in enumerate(samples) for each in sample.sequences]
    rows, routes = [each for _, each in numbered], [each.routes for _, each in numbered]
    columns = {name: [getattr(each, name) for each in rows] for name in _SAME} | {
        "sample": [number for number, _ in numbered],
        "prompt": [str(tokenizer.decode(each.token_ids[: prompt_length(each)])) for each in rows],
        "response": [str(tokenizer.decode(each.token_ids[prompt_length(each) :])) for each in rows],
        "rewards": [json.dumps(dict(each.rewards)) for each in rows],
        "routes": [None if x is None else x.numpy().tobytes() for x in routes],
        "route_shape": [None if x is None else [*x.shape] for x in routes],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")


def read_samples(path: Path) -> GenerationRound:
    table = pyarrow.parquet.read_table(path).to_pylist()
    episodes = [[*rows] for _, rows in groupby(table, key=itemgetter("sample"))]
    samples = [replace(_sample(first), others=tuple(map(_sample, others))) for first, *others in episodes]
    prompts = [Prompt(rows[0]["group_id"], [], rows[0]["prompt"]) for rows in episodes]
    results = [RewardResult(sample.reward, sample.rewards) for sample in samples]
    scored = RewardResults(results, sum(sample.reward is None for sample in samples), None)
    return GenerationRound(samples, prompts, [rows[0]["response"] for rows in episodes], scored)


def _sample(row: Mapping[str, Any]) -> Sample:
    values = {name: row[name] for name in _SAME}
    if row["routes"] is not None:
        values["routes"] = torch.frombuffer(bytearray(row["routes"]), dtype=torch.int16).view(row["route_shape"])
    return Sample(**values, rewards=json.loads(row["rewards"]))
