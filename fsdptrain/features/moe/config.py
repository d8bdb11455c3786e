"""Options of expert routing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from fsdptrain.config.rules import FSDP_ONLY, Fact, IdleWith, Problem
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config


class RouterConfig(Section):
    """Expert routing of mixture-of-experts models."""

    NAME = "router"
    PREFIX = "router_"
    RULES = (FSDP_ONLY,)
    FACTS = ((Fact.RECORDS_ROUTES, "router_replay=rollout"), (Fact.POLICY_SCORES, "router_replay=scoring"))

    replay: Annotated[Literal["off", "scoring", "rollout"], IdleWith("algorithm=sft")] = "off"
    """Replay recorded expert choices in training. `scoring`: from the computation of old logprobs (R2). `rollout`: from
    the engine (R3), for old logprobs too."""

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.replay == "scoring" and not config.scores_policy:
            reason = "where the policy is not scored: use --router-replay rollout, or remove it"
            yield from config.without_effect(["router_replay"], reason)
        ahead = config.sync.max_staleness
        if self.replay == "rollout" and ahead and config.rollout.engine == "vllm-server":
            yield (
                f"--router-replay rollout with --max-staleness {ahead}: servers read tokens again after a weight sync, "
                "with other experts: use --router-replay scoring, or leave one of them out"
            )
