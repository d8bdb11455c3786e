"""Build megatron-core's GPTModel, or this rank's pipeline stage of it, without loading weights."""

import os
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fsdptrain import platform, registry
from fsdptrain.config import Config
from fsdptrain.features.sections import ActivationMemoryConfig
from fsdptrain.megatron.config import MegatronConfig
from fsdptrain.megatron.cpu_shims import prepare_megatron, quiet_megatron
from fsdptrain.megatron.groups import process_groups
from fsdptrain.megatron.transformer_config import (
    WHOLE,
    family_of,
    is_whole,
    rotary_options,
    text_config,
    transformer_config,
)
from fsdptrain.model.loading.hub import resolve_config
from fsdptrain.model.loading.meta import build_meta_model
from fsdptrain.user_code import import_attribute

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

WRAPPED = "fsdptrain.megatron.hf_spec:layer_spec"  # layers with transformers mixers


def has_transformer_engine() -> bool:
    """Return whether to use Transformer Engine layers: megatron-core found it, and the run uses an accelerator."""
    with quiet_megatron():
        from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE and platform.has_accelerator()


def build_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `transformer_config` that depend on neither the model nor the parallel sizes."""
    return {
        "dtype": getattr(torch, config.compute_dtype_name),
        "has_engine": has_transformer_engine(),
        "on_cpu": not platform.has_accelerator(),
        "recompute": config.section(ActivationMemoryConfig).gradient_checkpointing,
        "deterministic": config.model.deterministic_mode,
    }


def check_sizes(config: Config) -> None:
    """Raise ConfigError if megatron-core cannot build the model of `config`, or not in its parallel sizes.

    Assumes GPUs with Transformer Engine, which allow the most: the run may be planned on another machine.
    """
    prepare_megatron()
    model = build_meta_model(
        resolve_config(config.model.hf_checkpoint),
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation="eager",
    )
    options: dict[str, Any] = build_options(config) | {"has_engine": True, "on_cpu": False}
    text, split = text_config(model.config), config.section(MegatronConfig)
    transformer_config(text, split, **options)
    if is_whole(text, split.spec):
        from fsdptrain.megatron.whole import check_structure

        check_structure(text)
        return
    _spec_function(text, split.spec)
    rotary_options(text)


def layer_spec(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, vp_stage: int | None = None
) -> "TransformerBlockSubmodules":
    """Return the native layers of this rank's stage: Transformer Engine layers if it imports, else plain torch.

    Functions passed to --megatron-spec have this signature.
    """
    with quiet_megatron():
        from megatron.core.models import backends
        from megatron.core.models.gpt import gpt_layer_specs

    engine = has_transformer_engine()
    if not engine:
        backends.WrappedTorchNorm = gpt_layer_specs.LNImpl = LocalNorm  # type: ignore[misc, assignment]
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        transformer_config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=vp_stage
    )


class LocalNorm(nn.RMSNorm):
    """torch's RMSNorm instead of megatron-core's, which rejects sequence parallelism and norms by 1 + weight.

    Under sequence parallelism each rank has the gradient of a part of the tokens; megatron-core sums those of marked
    parameters.
    """

    def __init__(self, config: "TransformerConfig", hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self._zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.eps).to(x.dtype)


def build_model(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, *, spec: str | None = None
) -> nn.ModuleList:
    """Build this rank's stage: its one part, or those of an interleaved schedule. spec: --megatron-spec.

    The forward of the last part of all returns hidden states [B, S, D]. Logits are computed in chunks from the head's
    weight.
    """
    count = transformer_config.virtual_pipeline_model_parallel_size
    numbers = [None] if count is None else range(count)
    return nn.ModuleList(_build_part(transformer_config, hf_config, spec, number) for number in numbers)


def _build_part(
    transformer_config: "TransformerConfig", hf_config: PreTrainedConfig, spec: str | None, vp_stage: int | None
) -> "GPTModel":
    with quiet_megatron():
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

    if is_whole(hf_config, spec):
        from fsdptrain.megatron.whole import WholeLayers

        return cast("GPTModel", WholeLayers(transformer_config, hf_config, vp_stage))
    layers = _spec_function(hf_config, spec)(transformer_config, hf_config, vp_stage=vp_stage)
    if transformer_config.deterministic_mode:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # required by Transformer Engine's attention
    with quiet_megatron():
        model = GPTModel(
            config=transformer_config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab(hf_config.vocab_size, transformer_config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            **rotary_options(hf_config),
        )
    for parameter in model.parameters():  # some are created in float32; buffers, such as router biases, stay in float32
        parameter.data = parameter.data.to(transformer_config.params_dtype)
    _mark_split(model)
    if model.pre_process and hf_config.pad_token_id is not None:
        _keep_padding(model, hf_config.pad_token_id)
    if model.post_process:
        hidden_alone: Any = _gather_rows if transformer_config.sequence_parallel else lambda input_, **_: (input_, None)
        model.output_layer.forward = hidden_alone
    model.eval()
    model.decoder.training = transformer_config.recompute_granularity is not None  # otherwise it never recomputes
    return model


def _keep_padding(model: "GPTModel", token: int) -> None:
    """Exclude the embedding of the pad token from training, as transformers does, even if a sequence contains it."""

    def without_gradient(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        tokens = args[0]
        if vars(module)["reduce_scatter_embeddings"]:  # sequence parallel: [S / R, B, D] for tokens [B, S]
            group = process_groups().tp
            tokens = tokens.t().contiguous()  # else `where` returns a transposed result, which no stage can send
            tokens = tokens.tensor_split(group.size())[group.rank()]
        return torch.where((tokens == token)[..., None], output.detach(), output)

    model.embedding.word_embeddings.register_forward_hook(without_gradient)


def _mark_split(model: "GPTModel") -> None:
    """Mark the parameters that tensor parallelism shards.

    megatron-core marks them only if it also initializes weights.
    """
    from megatron.core import tensor_parallel as tp

    for module in model.modules():
        if isinstance(module, tp.ColumnParallelLinear | tp.RowParallelLinear | tp.VocabParallelEmbedding):
            for parameter in module.parameters(recurse=False):
                if not getattr(parameter, "tensor_model_parallel", False):
                    dim = int(isinstance(module, tp.RowParallelLinear))
                    tp.set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def padded_vocab(vocab_size: int, tensor_parallel: int) -> int:
    """Pad the vocabulary to equal numbers of rows of embedding and head on each tensor-parallel rank."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _gather_rows(input_: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replace the head's forward under sequence parallelism: gather the rows of all ranks."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    # the head's backward already sums over ranks: each rank takes its own rows of the sum
    return gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False), None


def _spec_function(hf_config: PreTrainedConfig, spec: str | None) -> Any:
    if spec is not None:
        return registry.resolve(spec, dict.fromkeys([WHOLE]), flag="--megatron-spec")
    if family_of(hf_config).wrapped or family_of(hf_config).gated:
        return import_attribute(WRAPPED, flag=f"--backend megatron, of a {hf_config.model_type},")
    return layer_spec
