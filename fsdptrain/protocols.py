"""The seams: what a rollout engine, a training backend, a reward, an environment, a loss and a logger must offer.

Nothing is inherited: an object with these methods will do. Every method of an engine or a backend is collective: all
ranks call it in the same order, and the implementation decides who acts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from fsdptrain.types import (
    ChecksumKind,
    Completion,
    LogProbs,
    LossConfig,
    LossOutput,
    Metrics,
    PackedBatch,
    Prompt,
    SamplingParams,
    Segment,
    Turn,
)

if TYPE_CHECKING:
    from fsdptrain.feature import Features

Naming = Literal["hub", "module"]
ModelRole = Literal["policy", "reference"]


class RolloutEngine(Protocol):
    """Makes completions. Each rank passes its own share of the prompts and gets the completions of that share."""

    weight_naming: Naming  # the names that `update_weights` expects: of the files on the hub, or of the modules

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """`num_samples` completions for each prompt, prompt by prompt, in order.

        An engine may stop at a prompt's own `max_tokens`; the caller cuts what is longer.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take the full tensors of `weights` (every rank iterates it to the end) and answer with them from now on."""
        ...

    def sleep(self) -> None:
        """Give back device memory until `wake_up`. Nothing to do for an engine that sleeps already."""
        ...

    def wake_up(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class CheckedEngine(RolloutEngine, Protocol):
    """Additional methods that --verify-weight-sync needs; a custom engine may leave them out. None is collective."""

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> Mapping[str, int]:
        """`checksum` (rollout/weight_sync/checksum.py) of the tensors that the engine computes with, by the names of
        `update_weights`. Leaves out the `names` that it cannot read."""
        ...

    def cached_tokens(self) -> int:
        """Prompt tokens that the last `generate` took from the prefix cache of an earlier one."""
        ...


class ReplicaGoneError(Exception):
    """A replica is dead. It answers no request before it has taken weights again."""


class EngineReplica(Protocol):
    """One of several copies of the model that an engine serves. They are verified at the same time, each by one
    thread."""

    @property
    def name(self) -> str:
        """In messages."""
        ...

    def checksums(self, names: Collection[str], kind: ChecksumKind = "bits") -> Mapping[str, int] | None:
        """As of `CheckedEngine`; None if another rank reads this replica. Raises ReplicaGoneError."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]: ...

    def cached_tokens(self) -> int: ...


@runtime_checkable
class ReplicatedEngine(RolloutEngine, Protocol):
    """An engine with several copies of the model, which --verify-weight-sync verifies one by one."""

    def replicas(self) -> Sequence[EngineReplica]:
        """The replicas that this rank verifies: at least one, the same number on every rank. Each is used by a thread
        of its own, all at the same time. Not collective."""
        ...


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine in separate processes, which keeps generating while the trainer trains and pushes weights
    (--max-staleness)."""

    def generate_in_flight(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """As `generate`, but from any thread, and across `update_weights`: each token with the weights that the engine
        has at that moment, as `Completion.versions` says. Not collective. RolloutError once the engine is closed."""
        ...


@runtime_checkable
class FeatureEngine(RolloutEngine, Protocol):
    """An engine whose model needs the hooks of features, such as images in prompts."""

    def use_features(self, features: "Features") -> None: ...


@runtime_checkable
class AdapterEngine(RolloutEngine, Protocol):
    """An engine that holds the frozen weights of the checkpoint, and takes the adapter alone (--lora-sync adapter)."""

    def update_adapter(
        self, weights: Iterable[tuple[str, Tensor]], write_config: Callable[[Path], None], policy_version: int
    ) -> None:
        """Take the full tensors by peft's names (every rank iterates to the end); `write_config` makes
        adapter_config.json in a folder. Collective."""
        ...


class TrainBackend(Protocol):
    """Owns the policy, its optimizer and its reference."""

    def score(self, batches: Sequence[PackedBatch], model: ModelRole) -> list[LogProbs]:
        """Log-probabilities without gradient, on the CPU, one record for each batch."""
        ...

    def train_step(self, batches: Sequence[PackedBatch], loss: "Loss", config: LossConfig) -> Metrics:
        """One optimizer step over the packs of this rank; every rank passes the same number of packs."""
        ...

    def update_reference(self) -> None:
        """Make the present policy the reference. Checkpoints hold it from now on."""
        ...

    def hf_weights(self, naming: Naming = "hub") -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the compute dtype, layer by layer, on the device; every rank gets each of them."""
        ...

    def push_weights(self, engine: RolloutEngine, policy_version: int) -> bool:
        """Send the weights to `engine` in another way than by `hf_weights`; False where there is none."""
        ...

    def save(self, directory: Path, step: int) -> Callable[[], None] | None:
        """Returns what is left to be written, by a thread on every rank, or None where all is there."""
        ...

    def load(self, directory: Path) -> int:
        """Returns the step that was saved. Raises CheckpointError; never starts anew silently."""
        ...


@runtime_checkable
class OffloadingBackend(TrainBackend, Protocol):
    """A backend that can leave the device to an engine for a while (--offload-train)."""

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move everything to the host until `onload`, to make room for an engine on the same device. `keep_weights`:
        all but what `hf_weights` and `score` need. What is there already stays there."""
        ...

    def onload(self) -> None:
        """Nothing to do where nothing was moved."""
        ...


class PromptProcessor(Protocol):
    """Makes token ids of prompts that show images."""

    @property
    def chat_template(self) -> str | None:
        """None: the one of the tokenizer."""
        ...

    def read(self, text: str, pictures: Sequence[Any]) -> Segment:
        """Tokenize `text`, which has as many image marks as there are `pictures`. ValueError where they differ."""
        ...


class RewardFunction(Protocol):
    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, float] | None: ...


@runtime_checkable
class TimedReward(RewardFunction, Protocol):
    """A reward that counts, for each rollout anew, what calls that hang have cost."""

    def begin_rollout(self) -> None: ...


class Environment(Protocol):
    """The other side of a conversation. One object serves all episodes, from several threads at once.

    What it may have besides, and what for: docs/environments.md.
    """

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Begin an episode: its state, in whatever form. `seed` is the same for all samples of a prompt."""
        ...

    def step(self, state: Any, response: str) -> Turn:
        """Answer `response`. Called after each response of the model, also after one that a limit cut short."""
        ...


class Loss(Protocol):
    def __call__(self, batch: PackedBatch, logprobs: LogProbs, config: LossConfig) -> LossOutput: ...


class Logger(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, samples: Sequence[Mapping[str, object]], step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TimelineLogger(Logger, Protocol):
    """A logger that also keeps when each stage of rank 0 began and ended."""

    def log_timeline(self, spans: Sequence[Mapping[str, object]], step: int) -> None: ...
