"""Comparison of the tokenizers of policy and teacher: a token must have one id."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError


def load_tokenizer(config: Config, path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def require_same_tokenizer(config: Config, policy: PreTrainedTokenizerBase, teacher: Path) -> None:
    """Raise ConfigError if a token of the policy has another id, or none, in the vocabulary of the teacher."""
    try:
        theirs = load_tokenizer(config, teacher).get_vocab()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--opd-teacher {teacher} has no tokenizer that can be loaded: {error}") from error
    ours = policy.get_vocab()
    different = [token for token, id_ in ours.items() if theirs.get(token) != id_]
    if different:
        token = min(different, key=ours.__getitem__)
        raise ConfigError(
            f"--opd-teacher {config.value('opd_teacher')} has another tokenizer than --hf-checkpoint: token {token!r} "
            f"is {ours[token]} in one and {theirs.get(token)} in the other ({len(different):,} differ); choose a "
            "teacher of the same family"
        )
