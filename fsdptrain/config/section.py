"""Base class of configuration sections: frozen, strict, documented by the strings under the fields.

The core knows its own sections (`keys.CORE_SECTIONS`). Optional folders and plug-ins add sections for their options,
and tell the core through the properties of `Section` what these options change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import pydantic
from pydantic import BaseModel, BeforeValidator

from fsdptrain.config.rules import OnResume, Problem, Rule

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

STRICT = pydantic.ConfigDict(
    strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share work. `size` ranks form a group, `stride` apart.

    The stride is the product of the sizes of the pack-sharing groups before it; of a group that shares no packs, 1.
    """

    kind: str  # axis of the mesh: tensor, context, experts, ...
    key: str  # flat key of the option that sets the size
    size: int
    shares_packs: bool = True  # its ranks get the same packs
    shares_tokens: bool = False  # each holds a part of the tokens, so packs may be `size` times longer
    stride: int = 0  # 0: as described above

    def lies_within(self, other: "RankGroup") -> bool:
        """Whether each member of `other` is a whole group of this kind."""
        return self.shares_packs and self.stride * self.size <= other.stride


class Section(BaseModel):
    """Options that belong together. A subclass sets `NAME`; each field is an option."""

    model_config = STRICT

    NAME: ClassVar[str] = ""  # key of the section in recipes
    PREFIX: ClassVar[str] = ""  # before its flat keys, e.g. "lora_"
    RULES: ClassVar[tuple[Rule, ...]] = ()  # rules of all its fields
    ON_RESUME: ClassVar[OnResume] = OnResume.REFUSED  # of its fields without a mark

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        """Groups of ranks that its options form, fastest-varying first."""
        return ()

    @property
    def needs_own_attention(self) -> bool:
        """Whether its options require attention features that flash-attn kernels do not support."""
        return False

    @property
    def freezes_weights(self) -> bool:
        """Whether the checkpoint's weights are frozen: they are the reference, and stored in the compute dtype."""
        return False

    @property
    def runs_tower(self) -> bool:
        """Whether every forward pass goes through the parts outside of the language model too."""
        return False

    @property
    def trains_tower(self) -> bool:
        """Whether these parts are trained too."""
        return False

    @property
    def engine_has_own_devices(self) -> bool:
        """Whether the engine runs outside of the trainer's processes and devices."""
        return False

    @property
    def needs_embedded_engine(self) -> bool:
        """Whether --rollout-engine auto means the embedded engine, because vLLM cannot serve its options."""
        return False

    @property
    def records_routes(self) -> bool:
        """Whether training rollouts must record the experts that each token was routed to."""
        return False

    @property
    def needs_policy_scores(self) -> bool:
        """Whether the policy must score every pack before the first update, because training reads what it records."""
        return False

    @property
    def trains_zero_advantage(self) -> str:
        """Option that adds a gradient to samples with advantage 0, or needs them in the packs, or ""."""
        return ""

    @property
    def gives_advantages(self) -> bool:
        """Whether its options give tokens an advantage, or the loss a term, to learn from without rewards."""
        return False

    def problems(self, config: "Config") -> Iterator[Problem]:
        """Yield one line for each invalid combination that rules of fields cannot state."""
        del config
        return iter(())

    def launch_problems(self, world_size: int, local_world_size: int) -> Iterator[str]:
        """Yield one line for each option that does not work with this number of ranks, in all and per node."""
        del world_size, local_world_size
        return iter(())

    def undivided(self) -> Self:
        """Return a copy for a model that is not divided over ranks. Checkpoints do not depend on the division."""
        return self.model_copy(update={group.key.removeprefix(self.PREFIX): 1 for group in self.rank_groups})

    def for_export(self) -> Self:
        """Return a copy without options that only training needs."""
        return self


Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
