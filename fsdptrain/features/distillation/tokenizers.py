"""Comparison of the tokenizers of policy and teacher: a token must have one id."""

from transformers import PreTrainedTokenizerBase

from fsdptrain.errors import ConfigError


def require_same_tokenizer(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ConfigError if a token of the policy has another id, or none, in the vocabulary of the teacher `name`."""
    ours, theirs = policy.get_vocab(), teacher.get_vocab()
    different = [token for token, id_ in ours.items() if theirs.get(token) != id_]
    if different:
        token = min(different, key=ours.__getitem__)
        raise ConfigError(
            f"--opd-teacher {name} has another tokenizer than --hf-checkpoint: token {token!r} is {ours[token]} in one "
            f"and {theirs.get(token)} in the other ({len(different):,} differ); choose a teacher of the same family"
        )
