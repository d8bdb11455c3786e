"""--rollout-engine: a known name or an import path; other names are refused. Plug-ins: test_registry.py."""

from pathlib import Path

import pytest
import torch

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.rollout import choose_engine, engine_factory
from fsdptrain.rollout.embedded.engine import HFEngine
from tests.testing import FakeRolloutEngine, save_tiny_checkpoint

CPU = torch.device("cpu")
HERE = "tests.unit.rollout.test_engines:build_fake"


def build_fake(config: Config, *, checkpoint: Path, device: torch.device) -> FakeRolloutEngine:
    return FakeRolloutEngine(lambda prompt, index: [index])


def build(config, **parts):
    return engine_factory(config.rollout.engine)(config, **parts)


def config_with(engine: str) -> Config:
    config = Config(hf_checkpoint="here")
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def test_hf_builds_the_embedded_engine(tmp_path):
    save_tiny_checkpoint(tmp_path)
    engine = build(config_with("hf"), checkpoint=tmp_path, device=CPU)
    assert isinstance(engine, HFEngine)
    assert engine.max_batch_tokens == config_with("hf").rollout.max_batch_tokens
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}


def test_auto_takes_only_what_is_built(caplog):
    assert choose_engine("auto", device_type="cpu") == "hf"
    assert not caplog.messages
    assert choose_engine("auto", device_type="cuda") == "hf"
    assert caplog.messages[0].endswith("in the clone, pip install '.[vllm]'")
    assert choose_engine("vllm", device_type="cpu") == "vllm"


def test_an_engine_can_be_named_by_its_path_and_an_unknown_one_is_refused_with_the_flag():
    parts = {"checkpoint": Path("unused"), "device": CPU}
    assert isinstance(build(config_with(HERE), **parts), FakeRolloutEngine)
    with pytest.raises(ConfigError, match="--rollout-engine: unknown name 'hff'; did you mean 'hf'"):
        build(config_with("hff"), **parts)
