"""Small vision-language models with their processors: random weights, real transformers classes, no network.

folder = save(tmp_path, "qwen3_vl")          # weights, tokenizer, processor, chat template: a hub folder
model = build("gemma3", seed=3)              # float32, on the CPU
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import zoo
from tests.testing import tiny_tokenizer

SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCAB_SIZE = 272
IMAGE_TOKEN_ID = 263
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PLACES = {"vision_start_token_id": 261, "vision_end_token_id": 262, "image_token_id": IMAGE_TOKEN_ID} | {
    "video_token_id": 264
}


def _qwen2_5_vl() -> PreTrainedModel:
    tower = {**zoo.QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**_TEXT, "rope_parameters": {**_MROPE, "rope_type": "default"}}
    text.pop("head_dim")
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_PLACES)
    )


def _qwen3_vl() -> PreTrainedModel:
    tower = {**zoo.QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_PLACES)
    )


def _qwen3_5() -> PreTrainedModel:
    tower = {**zoo.QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
    rope = {**_MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    layers = ["linear_attention", "full_attention"]
    text = {**_TEXT, **zoo.GDN, "rope_parameters": rope, "layer_types": layers}
    return hf.Qwen3_5ForConditionalGeneration(
        hf.Qwen3_5Config(text_config=text, vision_config=tower, tie_word_embeddings=False, **_PLACES)
    )


def _gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    text = {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 16, "layer_types": layers}
    layers_and_heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    tower = {**zoo.TOWER, **layers_and_heads, "image_size": 16, "vision_use_head": False}
    places: dict[str, Any] = {"boi_token_index": 261, "eoi_token_index": 262, "image_token_index": IMAGE_TOKEN_ID}
    text["tie_word_embeddings"] = True
    places |= {"mm_tokens_per_image": 4, "tie_word_embeddings": True}
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=text, vision_config=tower, **places))


_MODELS = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5, "gemma3": _gemma3}
FAMILIES = tuple(_MODELS)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model, every parameter random, on the CPU in eval mode."""
    torch.manual_seed(seed)
    model = _MODELS[name]().float()
    zoo.randomize(model, seed)
    return model.eval()


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    found = tiny_tokenizer()
    found.add_special_tokens({"additional_special_tokens": SPECIAL}, replace_extra_special_tokens=False)
    place = "<|vision_start|>" if name == "gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    found.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + place + "{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return found


def save(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write model, tokenizer and processor as a hub folder. The config names `dtype` in its parts too."""
    model: Any = build(name, seed).to(dtype)
    model.config.text_config.dtype = model.config.vision_config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="200KB")
    words = tokenizer(name)
    if name == "gemma3":
        tokens = {"boi_token": SPECIAL[0], "eoi_token": SPECIAL[1], "image_token": SPECIAL[2]}
        words = PreTrainedTokenizerFast(
            tokenizer_object=words.backend_tokenizer,
            pad_token="<|pad|>",
            eos_token="<|end|>",
            additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", *SPECIAL],
            extra_special_tokens=tokens,
            chat_template=words.chat_template,
        )
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": "Gemma3Processor", "image_seq_length": 4})
        )
    else:
        Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
        ).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def picture(color: tuple[int, int, int], size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new("RGB", size, color)
