"""The GPTModel of megatron-core, or this rank's stage of it, without weights yet."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fsdptrain import platform, registry
from fsdptrain.config import Config
from fsdptrain.megatron.cpu_shims import quiet_megatron
from fsdptrain.megatron.groups import Groups
from fsdptrain.megatron.local_spec import completed
from fsdptrain.megatron.transformer_config import rotary_options, wraps

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

WRAPPED = "fsdptrain.megatron.hf_spec:layer_spec"  # layers with mixers of transformers


def has_transformer_engine() -> bool:
    """Layers are those of Transformer Engine: megatron-core found it, and this run computes on a device."""
    with quiet_megatron():
        from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE and platform.has_accelerator()


def build_options(config: Config) -> dict[str, Any]:
    """Of `transformer_config`: what the run says besides its model and how that is split."""
    return {
        "dtype": getattr(torch, config.compute_dtype_name),
        "has_engine": has_transformer_engine(),
        "on_cpu": not platform.has_accelerator(),
        "recompute": config.model.gradient_checkpointing,
        "deterministic": config.model.deterministic_mode,
    }


def layer_spec(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, vp_stage: int | None = None
) -> "TransformerBlockSubmodules":
    """megatron-core's own layers of this rank's stage: of Transformer Engine where it imports, else of plain torch.

    What --megatron-spec names has this signature too.
    """
    with quiet_megatron():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    engine = has_transformer_engine()
    block = get_gpt_decoder_block_spec(
        transformer_config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    return block if engine else completed(block)


def build_model(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, spec: str | None = None
) -> "GPTModel":
    """This rank's stage. Its forward returns hidden states [B, S, D] where it ends with the head: logits are made in
    chunks, by the head's weight. spec: --megatron-spec."""
    with quiet_megatron():
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

    context = transformer_config.context_parallel_size
    layers = _spec_function(hf_config, spec, context)(transformer_config, hf_config)
    if transformer_config.deterministic_mode:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention asks for it
    with quiet_megatron():
        model = GPTModel(
            config=transformer_config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab(hf_config.vocab_size, transformer_config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            **rotary_options(hf_config, context),
        )
    for parameter in model.parameters():  # some are made in float32; buffers, such as biases of routers, stay so
        parameter.data = parameter.data.to(transformer_config.params_dtype)
    _mark_split(model)
    if model.pre_process and hf_config.pad_token_id is not None:
        _keep_padding(model, hf_config.pad_token_id)
    if model.post_process:
        model.output_layer.forward = _gather_rows if transformer_config.sequence_parallel else _pass_on
    model.eval()
    model.decoder.training = transformer_config.recompute_granularity is not None  # else it never recomputes
    return model


def _keep_padding(model: "GPTModel", token: int) -> None:
    """transformers' embedding does not learn the vector of the pad token, not even where a sequence has that token."""

    def without_gradient(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        tokens = args[0]
        if vars(module)["reduce_scatter_embeddings"]:  # sequence parallel: [S / R, B, D] of tokens [B, S]
            group = Groups.present().tensor
            tokens = tokens.t().tensor_split(group.size())[group.rank()]
        return torch.where((tokens == token)[..., None], output.detach(), output)

    model.embedding.word_embeddings.register_forward_hook(without_gradient)


def _mark_split(model: "GPTModel") -> None:
    """What each tensor-parallel rank has a part of. megatron-core says so only where it also draws initial weights;
    Transformer Engine says it of all its matrices, of those too that each rank has whole: megatron-core's TELinear
    itself, whose subclasses are split."""
    from megatron.core import tensor_parallel as tp

    for module in model.modules():
        if type(module).__name__ == "TELinear":
            for parameter in module.parameters(recurse=False):
                vars(parameter)["tensor_model_parallel"] = False
        if isinstance(module, tp.ColumnParallelLinear | tp.RowParallelLinear | tp.VocabParallelEmbedding):
            for parameter in module.parameters(recurse=False):
                if not getattr(parameter, "tensor_model_parallel", False):
                    dim = int(isinstance(module, tp.RowParallelLinear))
                    tp.set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def padded_vocab(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of embedding and head, the same number on each tensor-parallel rank."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _pass_on(
    input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """In place of the head's forward."""
    return input_, None


def _gather_rows(
    input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same under sequence parallel, whose ranks have rows of their own."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    # the head's own backward sums over the ranks: here each takes its rows of that
    return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False), None


def _spec_function(hf_config: PreTrainedConfig, spec: str | None, context_parallel: int) -> Any:
    if spec is not None:
        return registry.resolve(spec, {}, flag="--megatron-spec")
    if wraps(hf_config, context_parallel):
        return registry.import_attribute(WRAPPED, flag=f"--backend megatron, of a {hf_config.model_type},")
    return layer_spec
