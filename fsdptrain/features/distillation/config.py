"""Options of the teacher."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from fsdptrain.config.rules import FSDP_ONLY, RL_ONLY, TUNING, Excludes, Fact, Problem, Requires
from fsdptrain.config.section import Section

if TYPE_CHECKING:
    from fsdptrain.config.root import Config

_JSD = Requires("opd_loss=jsd", fix="add --opd-loss jsd, or remove it")


class DistillationConfig(Section):
    """On-policy distillation from a teacher: docs/distillation.md."""

    NAME = "distillation"
    PREFIX = "opd_"
    RULES = (RL_ONLY, Requires("opd_teacher", fix="name a teacher, or remove it"), FSDP_ONLY)
    FACTS = ((Fact.TEACHES, "opd_teacher"), (Fact.ZERO_ADVANTAGE, "opd_teacher"))

    teacher: Annotated[
        str | None,
        TUNING,
        Excludes("image_key", fix="the teacher gets no images: leave one of them out"),
        Excludes("@is_truncated", reason="with truncated sampling, whose renormalized logprobs no teacher has: set "
                 "--rollout-top-p 1, --rollout-top-k and --rollout-min-p off"),
    ] = None  # fmt: skip
    """Teacher: a checkpoint (directory or Hub name) with the tokenizer of the policy, or the URL of a vLLM server.
    Default: no distillation."""
    loss: Annotated[
        Literal["token", "jsd"],
        Excludes("tensor_parallel_size>1", "context_parallel_size>1", fix="leave it out, or use token"),
        Excludes("epochs_per_rollout>1", fix="set it to 1"),
    ] = "token"
    """`token`: add opd_kl_coef * (teacher logprob - old logprob) to the advantage of each token, whose expectation is
    the negative reverse KL. `jsd`: add opd_kl_coef times the generalized Jensen-Shannon divergence of the next-token
    distributions to the loss of each token: of the teacher's opd_top_k most likely tokens, and all others together."""
    kl_coef: Annotated[float, TUNING] = Field(default=1.0, gt=0.0)
    """Coefficient of the teacher's term."""
    beta: Annotated[float, _JSD] = Field(default=0.5, ge=0.0, le=1.0)
    """jsd: 0 is the forward KL(teacher || policy), 1 the reverse KL(policy || teacher), between them the divergence to
    the mixture beta * teacher + (1 - beta) * policy (GKD)."""
    top_k: Annotated[int, _JSD] = Field(default=20, ge=1)
    """jsd: number of tokens to compare. A server allows 20 unless it has another --max-logprobs."""

    @property
    def is_server(self) -> bool:
        return self.teacher is not None and self.teacher.startswith(("http://", "https://"))

    def problems(self, config: "Config") -> Iterator[Problem]:
        if self.teacher is None:
            return
        if self.is_server and "@" in urlsplit(self.teacher).netloc:
            yield "--opd-teacher names a user in its URL: leave it out, and give a key by the variable TEACHER_API_KEY"
        if self.is_server and config.rollout.temperature != 1.0:
            yield (
                f"--opd-teacher {self.teacher} gives logprobs at temperature 1, not at --rollout-temperature "
                f"{config.rollout.temperature:g}: set that to 1, or use a checkpoint"
            )
        if not self.is_server and config.ranks_along("tensor") * config.ranks_along("experts") > 1:
            yield (
                f"--opd-teacher {self.teacher} is not split by --tensor-parallel-size and --expert-parallel-size: "
                "leave these out, or serve the teacher by vLLM and give its URL"
            )
        if self.loss == "token" and config.algorithm.loss == "gspo":
            yield (
                "--opd-loss token gives each token an advantage, and --loss gspo has one ratio per sequence: use "
                "--loss grpo, or --opd-loss jsd"
            )
