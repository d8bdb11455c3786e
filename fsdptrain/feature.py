"""The seam: what a feature (LoRA, experts, context parallelism, images, ...) may do to the policy.

A feature is a subclass of `Feature` that overrides the hooks it needs. `enabled_features.py` creates those that the
configuration turns on, in the order of the table in `fsdptrain/features/__init__.py`; nothing else in the core knows
their names. Every hook is called by all ranks in the same order, so a hook may use collectives.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.config import Config
from fsdptrain.types import Metrics, PackedBatch

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor
    from fsdptrain.data.packing.pack import PackPlan
    from fsdptrain.data.routes import RouteRecorder
    from fsdptrain.fsdp.mesh import Meshes
    from fsdptrain.model.probes.layout import LayoutProbe
    from fsdptrain.model.rows import Layout
    from fsdptrain.protocols import ForwardRole, Loss

LogProbsFunction = Callable[..., tuple[Tensor, Tensor | None]]  # the arguments of `model.logprobs.chunked_logprobs`
ChangeWeight = Callable[[Tensor], Tensor]


class Rows(Protocol):
    """Map the T tokens of a pack to the R = rows x columns tokens of the model call on this rank."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) on this rank."""
        ...

    @property
    def tokens(self) -> Tensor:
        """[t] i64: positions in the pack of the tokens that this rank computes, in order."""
        ...

    @property
    def loss_positions(self) -> Tensor:
        """[m] i64: the `batch.loss_positions` that this rank computes."""
        ...

    def inputs(self, *, pad_token_id: int | None) -> dict[str, Any]:
        """Return the keyword arguments for a transformers model."""
        ...

    def scatter(self, values: Tensor, *, fill: int) -> Tensor:
        """Map [T, ...] of the pack to [R, ...] of the flattened rows, with `fill` at padding."""
        ...

    def gather(self, values: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map [R, ...] of the flattened rows to [m, ...] at `positions` of the pack (default: `tokens`)."""
        ...

    def to_pack(self, values: Tensor, positions: Tensor) -> Tensor:
        """Map [m, ...] at `positions` to [T, ...], zero elsewhere; summed over the ranks that share the pack."""
        ...


class Adapter(Protocol):
    """Parameters that are trained instead of the model's."""

    def identity(self) -> str:
        """What a checkpoint must belong to, because its tensors do not say it."""
        ...

    def export(self, target: Path, write_model: Callable[[Path], None]) -> None:
        """Write the trained model to `target`. write_model: writes whole weights. Collective."""
        ...


class Feature:
    """A capability that attaches to the policy. The defaults do nothing."""

    cuts_parameters = False  # `transform_model` changes shapes, so the reference model needs it too

    @classmethod
    def create(cls, config: Config, checkpoint: Path) -> "Feature":
        """Create the feature for a run, before data, rewards and weights are loaded. Collective.

        Raises ConfigError on all ranks if the model does not support the options.
        """
        return cls()

    @property
    def prompt_processor(self) -> "PromptProcessor | None":
        """What makes token ids of prompts that are more than text."""
        return None

    # Weights

    def add_parameters(self, model: PreTrainedModel) -> None:
        """Add modules with parameters to the model on the meta device."""

    def transform_model(self, model: PreTrainedModel, meshes: "Meshes") -> None:
        """Change the model while it is on the meta device, before it is sharded."""

    def without(self) -> AbstractContextManager[None]:
        """Inside, the model has the modules and parameter names of the checkpoint."""
        return nullcontext()

    def after_load(self, model: PreTrainedModel) -> None:
        """The sharded model has its weights."""

    def verify(self, model: PreTrainedModel, probe: "LayoutProbe", vocab_size: int) -> None:
        """After the layout is chosen: compare the feature with the unmodified model; raise if they differ."""

    def export_weight(self, name: str) -> ChangeWeight | None:
        """Return what computes the exported float32 weight `name`. None: the parameter is exported as it is.

        It takes the parameter, or the previous feature's result, and returns a tensor with the same sharding.
        """
        return None

    @property
    def adapter(self) -> Adapter | None:
        """The parameters to train instead of the model's weights."""
        return None

    # Forward passes

    def plan_packs(
        self, lengths: Sequence[int], prompts: Sequence[tuple[int, int]], *, num_ranks: int, max_tokens: int
    ) -> "PackPlan | None":
        """Another plan of packs than the core's, or None. prompts: (key, length) of the prompt of each sample."""
        return None

    def rows(self, batch: PackedBatch, layout: "Layout", attention: str) -> Rows | None:
        """Another arrangement of the pack than the core's. attention: the implementation that the model has."""
        return None

    def forward(
        self, batch: PackedBatch, rows: Rows, role: "ForwardRole", inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Around the call of the base model and the head, inside the root's forward.

        role: what the logprobs are for. inputs: keyword arguments of the base model; add to them before entering.
        """
        return nullcontext()

    def outputs(self, batch: PackedBatch, rows: Rows, output: Any) -> dict[str, Tensor]:
        """More results of a forward pass, by name, from the base model's `output`; they end in `LogProbs.extras`.

        Those of scoring by the policy, [T, ...] and exact in float32, also end in `PackedBatch.extras`, for training.
        """
        return {}

    def logprobs_function(self, stock: LogProbsFunction) -> LogProbsFunction:
        """What computes logprobs from hidden states and the head's weight."""
        return stock

    def route_recorder(self, model: PreTrainedModel) -> "Callable[..., RouteRecorder] | None":
        """Record the experts that the engine's model chooses: (lengths of prompts, prompt of each row) -> recorder."""
        return None

    # Steps

    def score_packs(self, packs: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The packs of a rollout, on the CPU, before its first update; old and reference logprobs are in them."""
        return list(packs)

    def before_step(self, model: PreTrainedModel, batches: Sequence[PackedBatch]) -> Metrics:
        """Before the first pack of an optimizer step. Returns metrics of the step, the same on every rank."""
        return {}

    def loss_function(self, stock: "Loss") -> "Loss":
        """What computes the loss of one pack, on the device. stock: the loss of the run, or of the features before.

        If it adds a gradient to samples with advantage 0, its section must state `Fact.ZERO_ADVANTAGE`.
        """
        return stock
