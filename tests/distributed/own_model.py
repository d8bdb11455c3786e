"""A model with code of its own in one file, as authors publish it beside their weights."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own_lm"

    def __init__(self, vocab_size=264, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        super().__init__(**kwargs)


class OwnBlock(nn.Module):
    """It knows nothing of packs: rows of their own are the only layout that is exact."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden_states):
        rows, length, width = hidden_states.shape
        qkv = self.qkv(self.norm(hidden_states)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        hidden_states = hidden_states + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden_states + self.mlp(hidden_states)


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "body"
    _no_split_modules = ["OwnBlock"]  # noqa: RUF012 - as authors write it
    _supports_sdpa = True
    _supports_attention_backend = True


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(512, config.hidden_size)
        self.blocks = nn.ModuleList([OwnBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden_states = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return BaseModelOutput(self.norm(hidden_states))


class OwnForCausalLM(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.body = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        hidden_states = self.body(input_ids, attention_mask, position_ids)[0]
        return CausalLMOutput(
            logits=self.lm_head(hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states)
        )
