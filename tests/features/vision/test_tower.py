"""The vision tower of a model: its parameters, layouts, adapters and refusals."""

import pytest
import torch

from fsdptrain.enabled_features import Features
from fsdptrain.errors import ConfigError
from fsdptrain.features.lora.targets import find_targets
from fsdptrain.features.sections import LoraConfig
from fsdptrain.features.vision.feature import VisionFeature
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.features.vision.tower import refuse_blind
from fsdptrain.memory.estimate import count_parameters
from fsdptrain.model.attention.attention import resolve_attention, set_attention
from fsdptrain.model.loading.meta import model_from_config
from fsdptrain.model.policy import install_policy_forward
from fsdptrain.model.probes.layout import choose_layout
from fsdptrain.model.structure import decoder_layers, freeze_vision, language_model, tower_layers, vision_parameters
from tests import vision_zoo, zoo
from tests.matrix import only

LAYOUTS = {"qwen2_5_vl": "packed", "qwen3_vl": "packed", "qwen3_5": "padded", "gemma3": "padded"}


@pytest.mark.parametrize("name", vision_zoo.FAMILIES)
def test_a_model_is_its_text_its_tower_and_its_head(name: str):
    model = vision_zoo.build(name)
    text = set(language_model(model).parameters()) | set(model.get_output_embeddings().parameters())
    vision = set(vision_parameters(model).values())
    assert text | vision == set(model.parameters())
    assert not text & vision
    assert set(tower_layers(model)[0].parameters()) < vision
    assert set(decoder_layers(model)[0].parameters()) < text
    freeze_vision(model)
    assert count_parameters(model)[1] == sum(p.numel() for p in vision)


@pytest.mark.parametrize("name", only(["qwen3_next", "gpt_oss"], zoo.ARCHITECTURES))
def test_a_model_of_text_alone_has_no_vision(name: str):
    model = zoo.build(name)
    assert not vision_parameters(model)
    assert not tower_layers(model)
    with pytest.raises(ConfigError, match="takes no images"):
        refuse_blind(model)


def test_architectures_of_the_config_decide_whether_qwen3_5_has_its_tower():
    config = vision_zoo.build("qwen3_5").config
    for named, expected in (
        (["Qwen3_5ForConditionalGeneration"], "Qwen3_5ForConditionalGeneration"),
        (["Qwen3_5ForCausalLM"], "Qwen3_5ForCausalLM"),
        (None, "Qwen3_5ForCausalLM"),
    ):
        config.architectures = named
        with torch.device("meta"):
            assert type(model_from_config(config)).__name__ == expected


@pytest.mark.parametrize("name", vision_zoo.FAMILIES)
def test_the_layout_probe_includes_images(name: str, tmp_path):
    processor = ImageProcessor(vision_zoo.save(tmp_path, name), trust_remote_code=False, image_key="images")
    model = vision_zoo.build(name)
    model.config.use_cache = False
    set_attention(model, resolve_attention("auto", "cpu"))
    feature = VisionFeature(processor)
    feature.transform_model(model)
    features = Features([feature])
    install_policy_forward(model, chunk_size=16, features=features)
    options = {"vocab_size": 260, "compute_dtype": torch.float32, "device": torch.device("cpu")}
    assert choose_layout(model, "auto", **options, features=features).layout == LAYOUTS[name]
    set_attention(model, resolve_attention("auto", "cpu"))
    text_layout = choose_layout(model, "auto", **options).layout
    assert text_layout == ("padded" if name == "qwen3_5" else "packed")


@pytest.mark.parametrize("name", vision_zoo.FAMILIES)
def test_adapters_are_for_the_text_unless_the_tower_is_named(name: str):
    model = vision_zoo.build(name)
    inside = {n for n, _ in language_model(model).named_modules()}
    for targets in (["all-linear"], ["q_proj"]):
        found = find_targets(model, LoraConfig(rank=4, targets=targets).targets).modules
        assert found
        assert all(any(target.endswith(n) for n in inside if n) and "vis" not in target for target in found)
    tower = {"gemma3": "vision_tower.encoder.layers.0.self_attn.q_proj"}.get(name, "attn.proj")
    assert all("vis" in target for target in find_targets(model, [tower]).modules)
