"""Proof that a server holds the weights that it was given, from their files: of one that takes the place of another.

--sync-check looks at servers when all take new weights; this one would answer for the rest of a rollout unseen.
"""

from collections.abc import Collection, Iterator
from functools import partial

from safetensors import safe_open
from torch import Tensor

from fsdptrain.models.stored_otherwise import CHECKSUM_KINDS, Sent, explain
from fsdptrain.rollout.vllm_http import ServerGoneError, VLLMClient
from fsdptrain.rollout.vllm_server_copy import read_checksums
from fsdptrain.rollout.weight_push import Deadline, Weights


def prove(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
    """ServerGoneError where it holds a tensor that can be read otherwise than the files do."""
    sent = {name: Sent.of(tensor, ["bits"]) for name, tensor in _tensors(client, weights)}
    if not sent:  # an adapter: nobody can read it back
        return
    read = partial(read_checksums, client, deadline=deadline)
    held = read(list(sent), "bits")
    wrong = [name for name in sent if name in held and held[name] != sent[name].sums["bits"]]
    if wrong:  # or stored otherwise: what that needs is made of these alone
        sent |= {name: Sent.of(tensor, CHECKSUM_KINDS) for name, tensor in _tensors(client, weights, wrong)}
        otherwise = explain(wrong, held, sent, read)
        wrong = [name for name in wrong if name not in otherwise]
    if wrong:
        raise ServerGoneError(
            f"--sync-check: {client.url} took the place of another, and does not hold {wrong[0]} as it was sent, the "
            f"first of {len(wrong)} tensors that differ, of {len(sent)}"
        )


def _tensors(
    client: VLLMClient, weights: Weights, names: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Those of the files, or of these `names`, one by one."""
    for path in weights.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if names is None or name in names:
                    client.check_wanted("the proof of its weights")
                    yield name, file.get_tensor(name)
