"""Proof that a server holds the weights that it was given, from their files: of one that takes the place of another.

--sync-check looks at servers when all take new weights; this one would answer for the rest of a rollout unseen.
"""

from collections.abc import Collection, Sequence
from functools import partial

from safetensors import safe_open

from fsdptrain.rollout.weight_sync.storage_mismatch import CHECKSUM_KINDS, Sent, explain
from fsdptrain.types import ChecksumKind
from fsdptrain.vllm.server.client import ServerGoneError, VLLMClient
from fsdptrain.vllm.server.push import Deadline, Weights
from fsdptrain.vllm.server.replica import read_checksums


def prove(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
    """ServerGoneError where it holds a tensor that can be read otherwise than the files do."""
    sent = _sent(client, weights, ["bits"])
    if not sent:  # an adapter: nobody can read it back
        return
    read = partial(read_checksums, client, deadline=deadline)
    held = read(list(sent), "bits")
    wrong = [name for name in sent if name in held and held[name] != sent[name].sums["bits"]]
    if wrong:
        otherwise = explain(wrong, held, _sent(client, weights, CHECKSUM_KINDS, only=wrong), read)
        wrong = [name for name in wrong if name not in otherwise]
    if wrong:
        raise ServerGoneError(
            f"--sync-check: {client.url} took the place of another, and does not hold {wrong[0]} as it was sent, the "
            f"first of {len(wrong)} tensors that differ, of {len(sent)}"
        )


def _sent(
    client: VLLMClient, weights: Weights, kinds: Sequence[ChecksumKind], only: Collection[str] | None = None
) -> dict[str, Sent]:
    """Read from the files, as long as the server is wanted."""
    found = {}
    for path in weights.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if only is None or name in only:
                    client.check_wanted("the proof of its weights")
                    found[name] = Sent.of(file.get_tensor(name), kinds)
    return found
