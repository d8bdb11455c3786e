"""--rollout-engine: a known name, an import path or a plug-in; other names are refused."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from fsdptrain import registry
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
    assert caplog.messages[0].endswith("pip install 'fsdptrain[vllm]'")
    assert choose_engine("vllm", device_type="cpu") == "vllm"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hff", "--rollout-engine: unknown name 'hff'; did you mean 'hf'?"),
        ("nowhere.engines:Engine", "--rollout-engine nowhere.engines:Engine: No module named 'nowhere'"),
    ],
)
def test_an_unknown_engine_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as caught:
        build(config_with(name), checkpoint=Path("unused"), device=CPU)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_can_be_named_by_its_path_or_plugged_in(monkeypatch):
    by_path = build(config_with(HERE), checkpoint=Path("unused"), device=CPU)
    assert isinstance(by_path, FakeRolloutEngine)

    installed = EntryPoints([EntryPoint("rollout.mine", HERE, "fsdptrain.plugins")])
    monkeypatch.setattr(registry, "entry_points", installed.select)
    plugged_in = build(config_with("mine"), checkpoint=Path("unused"), device=CPU)
    assert isinstance(plugged_in, FakeRolloutEngine)
