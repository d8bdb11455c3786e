"""Rules that a field declares in its annotation, and the errors of broken rules. `checks.py` applies them.

    alpha: Annotated[int, Requires("lora_rank")] = 32

A rule applies to a field that was set, that is, whose value differs from the default and from the algorithm's preset.
Its conditions name other options by their flat key: `key` holds if that option is on, `key=a|b` if it has one of these
values, `key>1` if it is larger. `@name` is a property of `Config`. A condition on an option of a feature that is not
installed does not hold.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdptrain.errors import ConfigError

_CONDITION = re.compile(r"(?P<key>@?\w+)(?:(?P<relation>[=>])(?P<value>.+))?")


class NoEffectError(ConfigError):
    """Option without effect, given the other options or the model. `key`: flat name, if the configuration knows it."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


Problem = str | NoEffectError


@dataclass(frozen=True)
class Condition:
    """Parsed condition, for example `lr_decay_style=linear|cosine`."""

    key: str  # flat key, or `@` and the name of a property of `Config`
    relation: str  # "", "=" or ">"
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Condition":
        match = _CONDITION.fullmatch(text)
        assert match is not None, text
        return cls(match["key"], match["relation"] or "", tuple((match["value"] or "").split("|")))

    def holds_for(self, value: Any) -> bool:
        if self.relation == "=":
            return str(value) in self.values
        if self.relation == ">":
            return value is not None and value > float(self.values[0])
        return bool(value) and value not in ("none", "off")


class Rule:
    """Base of the rules. fix: what to do about it. reason: end of the message, in place of the generated one."""

    def __init__(self, *conditions: str, fix: str = "", reason: str = "") -> None:
        self.conditions = tuple(map(Condition.parse, conditions))
        self.fix = fix
        self.reason = reason


class Requires(Rule):
    """The option has no effect unless one of the conditions holds."""


class IdleWith(Rule):
    """The option has no effect if one of the conditions holds."""


class Excludes(Rule):
    """The option does not work if one of the conditions holds."""


class Mark(Enum):
    """What else an option is."""

    COLUMN = "names a column of --prompt-data: it has no effect on data without columns"
    EXPORT_CHOICE = "`fsdptrain export` accepts it too"
    NOT_EXPORTED = "`fsdptrain export` does not take it from the run: only training needs it, or it runs foreign code"


@dataclass(frozen=True)
class Package:
    """Marks an option that needs a package of an extra of this project; with `value`, only with this value."""

    module: str
    extra: str
    value: str = ""

    def is_needed(self, value: Any) -> bool:
        return self.value in (value if isinstance(value, list) else [value]) if self.value else bool(value)


@dataclass(frozen=True)
class RankGroup:
    """Marks an option as the size of groups of ranks that share work. `Config.rank_groups` fills in the last fields."""

    kind: str  # axis of the mesh: tensor, context, experts, ...
    shares_packs: bool = True  # its ranks get the same packs
    shares_tokens: bool = False  # each holds a part of the tokens, so packs may be `size` times longer
    crosses_packs: bool = False  # each of its ranks gets other packs
    key: str = ""  # flat key of the option
    size: int = 1
    stride: int = 1  # distance of its ranks


class Fact(Enum):
    """What options change elsewhere. `Section.FACTS` states under which conditions; `Config.has` tells."""

    OWN_ATTENTION = "packs need attention that flash-attn kernels do not support"
    FROZEN_WEIGHTS = "the checkpoint's weights are frozen: they are the reference, stored in the compute dtype"
    START = "more than new adapters is trained: what is trained has a copy of its start, for the reference"
    RUNS_TOWER = "every forward pass goes through the parts outside of the language model too"
    TRAINS_TOWER = "these parts are trained too"
    EMBEDDED_ENGINE = "--rollout-engine auto means the embedded engine: vLLM cannot serve the option"
    RECORDS_ROUTES = "training rollouts record the experts that each token was routed to"
    POLICY_SCORES = "the policy scores every pack before the first update: training reads what it records"
    ZERO_ADVANTAGE = "samples with advantage 0 get a gradient, or must be in the packs"
    TEACHES = "tokens get an advantage, or the loss a term, without rewards"


class OnResume(Enum):
    """What a change of an option means for a run that resumes. Unmarked fields: `Section.ON_RESUME`."""

    REFUSED = "another experiment"
    TUNING = "the experiment, trained differently from now on"
    NEUTRAL = "the same training"


REFUSED, TUNING, NEUTRAL = OnResume.REFUSED, OnResume.TUNING, OnResume.NEUTRAL
COLUMN, EXPORT_CHOICE, NOT_EXPORTED = Mark.COLUMN, Mark.EXPORT_CHOICE, Mark.NOT_EXPORTED
FSDP_ONLY = Excludes("backend=megatron")
RL_ONLY = IdleWith("algorithm=sft", fix="remove it, or use another --algorithm, e.g. grpo")
NEEDS_KL = Requires("kl_loss_coef", fix="set it, e.g. to 0.001")
WHOLE_VOCABULARY = Excludes(
    "@is_truncated", reason="with --rollout-top-p, --rollout-top-k and --rollout-min-p: leave one of them out"
)
