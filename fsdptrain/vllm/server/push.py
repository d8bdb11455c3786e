"""Give one server the weights that lie in files: by their paths, or bucket by bucket over a group. Nothing is repeated.

A server whose update failed half way holds layers without weights: it must be started again before it is used.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from safetensors import safe_open

from fsdptrain.vllm.server.client import ServerError, ServerGoneError, ServerRefusedError, ServerSilentError, VLLMClient
from fsdptrain.vllm.worker.weight_group import (
    Plane,
    WeightGroup,
    all_here,
    meeting_point,
    own_address,
    pack_bucket,
    spec_of,
)

_POLL_S = 0.02


class Deadline:
    """One deadline for many waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """[s] at least a little, so that a wait that is over fails as such."""
        return max(0.01, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end


@dataclass(frozen=True)
class Weights:
    """One version as files. `tag` is what an engine says that it holds."""

    files: Sequence[Path]
    tag: str
    before: str | None = None  # the tag of the version before
    adapter: Path | None = None  # a folder, in place of all files: the weights that it stands beside do not change


class Push(Protocol):
    def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        """Between start and finish of an update. ServerError where it fails."""
        ...

    def forget(self, client: VLLMClient) -> None:
        """The server was started again, or has served somebody else: what it knew of us is gone."""
        ...


def update(
    client: VLLMClient, weights: Weights, push: Push, deadline: Deadline, *, keep_requests: bool = False
) -> None:
    """Stop the engine, give it `weights`, forget cached prefixes, and make sure of its version. It stays stopped.

    keep_requests: those that it works on go on from their last token when the engine does: what they have read and
    sampled is read anew with the new weights. Else they are ended.
    """
    client.post(f"/pause?mode={'keep' if keep_requests else 'abort'}", timeout=deadline.left)
    has_before = client.version(timeout=deadline.left) == weights.before
    if weights.adapter is not None:
        _load_adapter(client, weights.adapter, weights, has_before, deadline)
    else:
        _load_weights(client, weights, has_before, push, deadline)
    if not client.post("/reset_prefix_cache", timeout=deadline.left)["success"]:
        raise ServerRefusedError(
            f"{client.url} did not forget its cached prefixes: they belong to the weights of before"
        )
    found = client.version(timeout=deadline.left)
    if found != weights.tag:
        raise ServerRefusedError(f"{client.url} holds version {found!r} after the update to {weights.tag!r}")


def _load_weights(client: VLLMClient, weights: Weights, has_before: bool, push: Push, deadline: Deadline) -> None:
    if not has_before:
        push.forget(client)
        client.post("/collective_rpc", {"method": "fsdptrain_give_up_update"}, timeout=deadline.left)
    client.post("/start_weight_update", timeout=deadline.left)
    push.send(client, weights.files, deadline)
    client.post("/finish_weight_update", {"weight_version": weights.tag}, timeout=deadline.left)


def _load_adapter(client: VLLMClient, folder: Path, weights: Weights, has_before: bool, deadline: Deadline) -> None:
    """Under the name of its version, in place of the one before."""
    if has_before:
        client.post("/v1/unload_lora_adapter", {"lora_name": weights.before}, timeout=deadline.left)
    body = {"lora_name": weights.tag, "lora_path": str(folder.resolve())}
    client.post("/v1/load_lora_adapter", body, timeout=deadline.left)
    client.post("/update_weight_version", {"new_version": weights.tag}, timeout=deadline.left)


class FilePush:
    """The server reads the files itself."""

    def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        paths = [str(path.resolve()) for path in files]
        client.post("/update_weights", {"update_info": {"paths": paths}}, timeout=deadline.left)

    def forget(self, client: VLLMClient) -> None: ...


class GroupPush:
    """This process reads the files and sends them, each file one bucket, to the workers of one server at a time.

    Each server has a group of its own, so that one that dies harms no other.
    """

    def __init__(self, plane: Literal["gloo", "nccl"], timeout_s: float) -> None:
        """timeout_s: how long workers wait for a bucket."""
        self._plane: Plane = plane
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}  # by address

    def send(self, client: VLLMClient, files: Sequence[Path], deadline: Deadline) -> None:
        try:
            group = self._groups.pop(client.url, None) or self._join(client, deadline)
            for path in files:
                with safe_open(path, "pt") as file:
                    self._send_bucket(client, group, {n: file.get_tensor(n) for n in file.keys()}, deadline)  # noqa: SIM118
        except RuntimeError as error:  # torch's, of a peer that is gone or silent
            kind = ServerSilentError if "imed out" in str(error) or "imeout" in str(error) else ServerGoneError
            raise kind(f"{client.url} broke off a transfer over {self._plane}: {_first_line(error)}") from None
        self._groups[client.url] = group  # only one over which all went well is used again

    def forget(self, client: VLLMClient) -> None:
        self._groups.pop(client.url, None)

    def _join(self, client: VLLMClient, deadline: Deadline) -> WeightGroup:
        world_size = 1 + client.get("/get_world_size", timeout=deadline.left)["world_size"]
        address = own_address(client.host)
        store = meeting_point(address, world_size, deadline.left)
        join = {
            "plane": self._plane,
            "host": address,
            "port": store.port,
            "world_size": world_size,
            "timeout_s": self._timeout_s,
        }
        with ThreadPoolExecutor(1) as thread:  # the workers answer when all have met
            answer = thread.submit(
                client.post, "/init_weight_transfer_engine", {"init_info": join}, timeout=deadline.left
            )
            while not all_here(store, world_size) and not deadline.is_over and not answer.done():
                time.sleep(_POLL_S)
            if answer.done():
                answer.result()  # it said why it does not come
            try:
                group = WeightGroup(
                    self._plane, store, rank=0, world_size=world_size, timeout_s=deadline.left, address=address
                )
            except RuntimeError as error:
                _raise_cause(answer.exception(), error)
            answer.result()
        return group

    def _send_bucket(self, client: VLLMClient, group: WeightGroup, tensors: dict, deadline: Deadline) -> None:
        specs = [asdict(spec_of(name, tensor)) for name, tensor in tensors.items()]
        with ThreadPoolExecutor(1) as thread:  # the workers answer when they have received it
            answer = thread.submit(
                client.post, "/update_weights", {"update_info": {"bucket": specs}}, timeout=deadline.left
            )
            try:
                group.send(pack_bucket(list(tensors.values()), group.device), timeout_s=deadline.left)
            except RuntimeError as error:
                _raise_cause(answer.exception(), error)
            answer.result()


def _raise_cause(said: BaseException | None, error: RuntimeError) -> NoReturn:
    """What the server said of it, where it said something; else what torch did."""
    raise said if isinstance(said, ServerError) else error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
