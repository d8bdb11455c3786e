"""Proof that a server holds the weights that it was given, from their files: of one that takes the place of another.

--sync-check looks at servers when all take new weights; this one would answer for the rest of a rollout unseen.
"""

from functools import partial

from safetensors import safe_open

from fsdptrain.models.stored_otherwise import CHECKSUM_KINDS, Sent, explain
from fsdptrain.rollout.vllm_http import ServerGoneError, VLLMClient
from fsdptrain.rollout.vllm_server_copy import read_checksums
from fsdptrain.rollout.weight_push import Deadline, Weights


def prove(client: VLLMClient, weights: Weights, deadline: Deadline) -> None:
    """ServerGoneError where it holds a tensor that can be read otherwise than the files do."""
    sent = dict[str, Sent]()
    for path in weights.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                client.check_wanted("the proof of its weights")
                sent[name] = Sent.of(file.get_tensor(name), CHECKSUM_KINDS)
    if not sent:  # an adapter: nobody can read it back
        return
    read = partial(read_checksums, client, deadline=deadline)
    held = read(list(sent), "bits")
    wrong = [name for name in sent if name in held and held[name] != sent[name].sums["bits"]]
    otherwise = explain(wrong, held, sent, read) if wrong else {}
    wrong = [name for name in wrong if name not in otherwise]
    if wrong:
        raise ServerGoneError(
            f"--sync-check: {client.url} took the place of another, and does not hold {wrong[0]} as it was sent, the "
            f"first of {len(wrong)} tensors that differ, of {len(sent)}"
        )
