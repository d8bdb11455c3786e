"""Dynamic sampling: select the groups of a rollout to train on (DAPO, arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward has zero advantages. It is dropped and replaced by new prompts, in
rounds, up to a maximum. All ranks gather the results of all groups and make the same decisions. Groups are judged in
stream order, so the prompts drawn, kept and dropped do not depend on the number of ranks.
"""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from fsdptrain.distributed import gather
from fsdptrain.errors import RolloutError
from fsdptrain.rewards.parallel import RewardResults
from fsdptrain.trainer.phases import Stopwatch
from fsdptrain.trainer.samples.single_turn import GenerationRound
from fsdptrain.trainer.samples.source import RolloutSource, own_share, sampling_at
from fsdptrain.types import Images, Metrics, Prompt, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupResult:
    """Rewards of the samples of one prompt, before shaping."""

    owner: int  # rank that holds the samples
    num_scored: int
    reward_sum: float
    spread: float  # largest minus smallest reward; 0 if nothing was scored


@dataclass(frozen=True)
class SelectionRules:
    """How groups are selected. By default all groups of the first round are kept."""

    dynamic: bool = False
    max_rounds: int = 1


@dataclass
class Selection:
    """The groups of one rollout over all rounds. Identical on every rank."""

    rules: SelectionRules
    wanted: int  # groups
    generated: list[GroupResult] = field(default_factory=list)
    kept: list[GroupResult] = field(default_factory=list)  # in stream order
    rounds: int = 0

    @property
    def missing(self) -> int:
        return self.wanted - len(self.kept)

    @property
    def needs_round(self) -> bool:
        return self.missing > 0 and self.rounds < self.rules.max_rounds

    @property
    def num_to_sample(self) -> int:
        """Number of prompts of the next round.

        The first round has as many prompts as groups are wanted. Later rounds have the number that probably suffices.
        """
        if not self.generated:
            return self.wanted
        rate = (self.num_useful + 1) / (len(self.generated) + 2)
        return min(self.wanted, likely_enough(self.missing, rate))

    @property
    def num_useful(self) -> int:
        return sum(self._is_useful(group) for group in self.generated)

    def add(self, groups: Sequence[GroupResult]) -> list[bool]:
        """Return whether each group of a round is kept. Useful groups beyond `wanted` are dropped."""
        chosen: list[bool] = []
        for group in groups:
            chosen.append(self.missing > 0 and self._is_useful(group))
            if chosen[-1]:
                self.kept.append(group)
        self.generated += groups
        self.rounds += 1
        return chosen

    def check(self, step: int) -> None:
        """Warn if fewer groups than wanted were kept. Raises RolloutError, on all ranks, if none was kept."""
        if self.kept:
            if self.missing and self.rules.max_rounds > 1:
                line = "rollout %d trains on %d of %d groups: --dynamic-sampling-max-rounds %d brought no more"
                log.warning(line, step + 1, len(self.kept), self.wanted, self.rules.max_rounds)
            return
        raise RolloutError(
            f"--dynamic-sampling kept none of {len(self.generated)} groups in {self.rounds} rounds: the rewards of "
            f"each group are equal, their mean is {self._reward_mean:.3g}; "
            "train on easier or harder prompts, raise --dynamic-sampling-max-rounds, or use --no-dynamic-sampling"
        )

    def metrics(self) -> Metrics:
        """Compute selection/* and group/* over all generated groups. Sample metrics cover only the kept groups."""
        if not self.rules.dynamic:
            return {}
        generated = max(1, len(self.generated))
        return {
            "selection/rounds": float(self.rounds),
            "selection/generated_groups": float(len(self.generated)),
            "selection/kept_fraction": len(self.kept) / generated,
            "selection/surplus_groups": float(self.num_useful - len(self.kept)),
            "selection/missing_groups": float(self.missing),
            "selection/reward_mean": self._reward_mean,
            "group/zero_std_fraction": sum(group.spread == 0 for group in self.generated) / generated,
        }

    @property
    def _reward_mean(self) -> float:
        scored = sum(group.num_scored for group in self.generated)
        return math.fsum(group.reward_sum for group in self.generated) / max(1, scored)

    def _is_useful(self, group: GroupResult) -> bool:
        return not self.rules.dynamic or group.spread > 0


def likely_enough(missing: int, rate: float) -> int:
    """Return the number of prompts that yields `missing` kept groups with a probability of about 5/6.

    `rate` is the probability that a group is kept. Returns the smallest n whose mean n r is one standard deviation,
    sqrt(n r (1 - r)), above `missing`. One more prompt costs less than one more round, which takes as long as its
    longest response.
    """
    deviation = math.sqrt(rate * (1 - rate))
    root = (deviation + math.sqrt(deviation**2 + 4 * rate * missing)) / (2 * rate)
    return math.ceil(root**2 - 1e-9)


def select_groups(
    source: RolloutSource, rules: SelectionRules, step: int, watch: Stopwatch, images: dict[str, Images]
) -> tuple[GenerationRound, Metrics]:
    """Generate rounds until enough groups are kept. Returns their samples on this rank, and metrics. Collective."""
    selection, rounds = Selection(rules, wanted=source.num_prompts), list[GenerationRound]()
    while selection.needs_round:
        sampling = sampling_at(source.sampling, step, selection.rounds)
        prompts, generated = source.generate(selection.num_to_sample, sampling, watch, images)
        chosen = selection.add(gather_results(own_share(prompts), generated.samples))
        rounds.append(only({prompt.id for prompt, keep in zip(prompts, chosen, strict=True) if keep}, generated))
        source.check_rewards(joined(rounds).results)
    selection.check(step)
    return joined(rounds), selection.metrics()


def only(prompt_ids: Collection[str], generated: GenerationRound) -> GenerationRound:
    """Keep only the samples of the given prompts, but all results."""
    kept = [i for i, prompt in enumerate(generated.prompts) if prompt.id in prompt_ids]
    return replace(
        generated,
        samples=[generated.samples[i] for i in kept],
        prompts=[generated.prompts[i] for i in kept],
        texts=[generated.texts[i] for i in kept],
    )


def joined(rounds: Sequence[GenerationRound]) -> GenerationRound:
    """Join rounds, of which there may be none."""
    counts: dict[str, float] = {}
    for name, count in (pair for each in rounds for pair in each.counts.items()):
        counts[name] = counts.get(name, 0.0) + count
    results = RewardResults(
        [result for each in rounds for result in each.results.results],
        sum(each.results.num_unscored for each in rounds),
        next((each.results.first_error for each in rounds if each.results.first_error), None),
    )
    return GenerationRound(
        samples=[sample for each in rounds for sample in each.samples],
        prompts=[prompt for each in rounds for prompt in each.prompts],
        texts=[text for each in rounds for text in each.texts],
        results=results,
        counts=counts,
    )


def gather_results(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[GroupResult]:
    """Gather the group results of all ranks in rank order, which is stream order. Collective."""
    members: dict[str, list[Sample]] = {prompt.id: [] for prompt in prompts}
    for sample in samples:
        members[sample.group_id].append(sample)
    own = [group_result(group, owner=dist.get_rank()) for group in members.values()]
    return [group for groups in gather(own) for group in groups]


def group_result(members: Sequence[Sample], *, owner: int) -> GroupResult:
    """Summarize the rewards of one prompt's samples, held by rank `owner`."""
    rewards = [sample.reward for sample in members if sample.reward is not None]
    return GroupResult(
        owner=owner,
        num_scored=len(rewards),
        reward_sum=math.fsum(rewards),
        spread=max(rewards) - min(rewards) if rewards else 0.0,
    )
