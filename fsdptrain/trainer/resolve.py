"""Values that depend on the machine, the tokenizer or the environment: what runs, and what config.yaml holds."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fsdptrain import platform
from fsdptrain.config import Config, DataConfig
from fsdptrain.config.checks import check
from fsdptrain.config.keys import all_keys
from fsdptrain.config.presets import preset_values
from fsdptrain.config.rules import Fact, NoEffectError
from fsdptrain.distributed import gather, raise_on_all_ranks
from fsdptrain.errors import ConfigError, DataError
from fsdptrain.rollout import choose_engine
from fsdptrain.trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from fsdptrain.data.images import PromptProcessor
    from fsdptrain.trainer.samples.environment import LoadedEnvironment

log = logging.getLogger(__name__)


def resolve_dtype(config: Config) -> tuple[Config, str]:
    """Return the configuration with --bf16 auto decided, alike on all ranks, and a line that says why. Collective."""
    if config.model.bf16 != "auto":
        return config, ""
    fast, reason = platform.bfloat16_reason()
    slow = [reason for fast, reason in gather((fast, reason)) if not fast]
    config = config.with_values(bf16=not slow)
    return config, f"--bf16 auto: computing in {config.compute_dtype_name}, because {slow[0] if slow else reason}"


def load_environment(config: Config) -> "LoadedEnvironment | None":
    """Load --environment, if given. Collective."""
    if not config.environment.has_episodes:
        return None
    from fsdptrain.trainer.samples.environment import build_environment

    with raise_on_all_ranks(ConfigError, "--environment"):
        return build_environment(config.environment, config.data.environment_key)


def open_tokenizer(config: Config, checkpoint: Path, processor: "PromptProcessor | None") -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the chat template of the processor if there is one. Collective."""
    with raise_on_all_ranks(DataError, "--prompt-data"):
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=config.model.trust_remote_code)
        if processor is not None and processor.chat_template is not None:
            tokenizer.chat_template = processor.chat_template
        return tokenizer


def resolve(config: Config, tokenizer: PreTrainedTokenizerBase, environment: "LoadedEnvironment | None") -> Config:
    """Return the configuration that runs: the engine's name, the environment's instructions, the thinking mode.

    Resolving it again changes nothing, so a run resumes with the same values. Collective.
    """
    stop = {*config.rollout.stop_token_ids}
    if stop and (unknown := stop - {*tokenizer.get_vocab().values()}):
        raise ConfigError(
            f"--rollout-stop-token-ids {min(unknown)}: the tokenizer of --hf-checkpoint has no such token: remove it"
        )
    with raise_on_all_ranks(ConfigError, "--environment"):
        values = environment.values_for(config) if environment is not None else {}
    config = config.with_values(**values)
    config = config.with_values(**_thinking_mode(config, tokenizer))
    if not config.generates or config.run.replay_rollouts or config.rollout.engine != "auto":
        return config
    name = "hf" if config.has(Fact.EMBEDDED_ENGINE) else choose_engine("auto", device_type=platform.device_type())
    return _without_idle(config.with_values(rollout_engine=name))


def _thinking_mode(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Turn off the thinking mode of a chat template for the default data, whose answers fit into the default length."""
    data = config.data
    is_default = data.prompt_data == DataConfig().prompt_data and not data.chat_template_kwargs
    if not is_default or not data.apply_chat_template or "enable_thinking" not in str(tokenizer.chat_template):
        return {}
    log.info("thinking mode is off for the default data; --chat-template-kwargs enable_thinking=true turns it on")
    return {"chat_template_kwargs": {"enable_thinking": False}}


def _without_idle(config: Config) -> Config:
    """Reset the options that the chosen engine does not read, so that the written configuration can be read back."""
    preset = preset_values(config.algorithm.algorithm, config.algorithm.loss)
    while True:
        try:
            check(config)
        except NoEffectError as error:
            if not error.key:
                raise
            log.warning("%s: --rollout-engine auto is %s here", error, config.rollout.engine)
            config = config.with_values(**{error.key: preset.get(error.key, all_keys()[error.key].default)})
        else:
            return config
