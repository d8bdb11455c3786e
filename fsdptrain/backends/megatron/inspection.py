"""What a run on megatron-core will be built of, from config.json alone: by a small random model of the same kind."""

from dataclasses import asdict
from typing import Any

import torch

from fsdptrain import platform
from fsdptrain.backends.megatron import require_megatron
from fsdptrain.backends.megatron.cpu_shims import install_cpu_shims
from fsdptrain.backends.megatron.forward import layout_of
from fsdptrain.backends.megatron.groups import start_groups, stop_groups
from fsdptrain.backends.megatron.model import has_transformer_engine
from fsdptrain.backends.megatron.parity import check_parity, small_models
from fsdptrain.backends.megatron.report import build_report
from fsdptrain.backends.megatron.transformer_config import transformer_config
from fsdptrain.config import Config
from fsdptrain.config.megatron import MegatronConfig
from fsdptrain.models.files import resolve_config
from fsdptrain.models.loading import build_meta_model


def inspect_build(config: Config) -> dict[str, Any]:
    """The lines of the report of the small model, unsplit, and its kernels. Raises what a run would end with.

    It has the heads, the norms, the rotary frequencies and the router of the whole model, and fewer layers and experts.
    """
    require_megatron()
    path = resolve_config(config.model.hf_checkpoint)
    stock = build_meta_model(path, trust_remote_code=config.model.trust_remote_code, attn_implementation="eager")
    on_cpu = not platform.has_accelerator()
    shims = install_cpu_shims() if on_cpu else []
    options = {"dtype": torch.float32, "has_engine": has_transformer_engine(), "on_cpu": on_cpu}
    transformer_config(stock.config, config.megatron, **options)  # what the split of the run would be refused for
    one = MegatronConfig(moe_dispatcher=config.megatron.moe_dispatcher, spec=config.megatron.spec)
    layout = layout_of(stock.config, one, has_engine=options["has_engine"])
    with platform.process_group(config.launch.dist_timeout):
        start_groups(one, timeout_s=config.launch.dist_timeout)
        try:
            copies = {"spec": one.spec, "device": platform.local_device()}
            small, model = small_models(stock.config, one, options, **copies)
            report = build_report(model, small, layout=layout, shims=shims)
            difference, tolerance = check_parity(stock.config, one, options, **copies)
        finally:
            stop_groups()
    measured = f"a small random copy computes the logprobs of transformers: {difference:.2g} <= {tolerance:g}"
    return {"lines": [*report.lines, measured], "kernels": [asdict(kernel) for kernel in report.kernels]}
