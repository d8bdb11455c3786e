"""Schedules against closed formulas, AdamW against torch, clipping, skipped steps, loss scale."""

import json
import math
from typing import Any

import pytest
import torch

from fsdptrain.config import Config, OptimConfig
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.fsdp import optimizer as optimizer_module
from fsdptrain.fsdp.optimizer import MAX_SKIPPED, Optimizer
from fsdptrain.fsdp.optimizer_state import create_state, load_state_dict, state_dict, state_tensors
from fsdptrain.fsdp.optimizers import parameter_groups
from fsdptrain.fsdp.schedule import lr_schedule
from fsdptrain.fsdp.trained import choose_trained
from fsdptrain.memory.estimate import Shapes
from tests import zoo
from tests.testing import tiny_qwen3

LR, MIN = 3e-4, 3e-5


def schedule(style: str, **values: Any):
    config = OptimConfig(lr=LR, min_lr=MIN, lr_decay_style=style, **values)
    return lr_schedule(config, total_steps=100)


CLOSED = {
    "constant": lambda k: LR,
    "linear": lambda k: MIN + (LR - MIN) * (100 - k) / 90,
    "cosine": lambda k: MIN + (LR - MIN) * (1 + math.cos(math.pi * (k - 10) / 90)) / 2,
}


@pytest.mark.parametrize("style", CLOSED)
def test_warmup_is_linear_and_decay_follows_its_formula(style):
    lr = schedule(style, lr_warmup_iters=10)
    for k in range(101):
        assert lr(k) == pytest.approx(LR * k / 10 if k <= 10 else CLOSED[style](k), rel=1e-12)
    assert lr(101) == lr(10_000) == (LR if style == "constant" else MIN)
    assert schedule(style)(0) == LR  # without warmup


def fill_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * scale


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("clip", [0.5, 1e6, 0.0])
def test_in_float32_steps_are_scheduled_and_clipped_as_by_a_pass_over_the_gradients(
    clip: float, offload: bool, fp16: bool
):
    """In float64 and with weight decay: tests/distributed/test_optimizers.py."""
    ours, theirs = tiny_qwen3(), tiny_qwen3()
    # a large epsilon: without it Adam's steps do not depend on the size of gradients
    config = OptimConfig(lr=1e-2, adam_eps=1e-2, clip_grad=clip, offload_optimizer=offload, lr_decay_style="linear")
    optimizer = Optimizer(ours, config, total_steps=10, fp16=fp16)
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0, fused=True
    )
    for step in range(3):
        scale = optimizer.scale(torch.tensor(1.0)).item()
        fill_gradients(ours, step, scale=scale)
        fill_gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        reference.param_groups[0]["lr"] = 1e-2 * (10 - step) / 10
        assert optimizer.clip().item() == pytest.approx(norm.item(), rel=1e-6)
        optimizer.step()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=2e-8)
    assert {p.grad for p in ours.parameters()} == {None}
    [first, *_] = reference.state.values()
    torch.testing.assert_close(state_tensors(optimizer)["model.embed_tokens.weight.exp_avg"], first["exp_avg"])


@pytest.mark.parametrize("in_step", [True, False])
def test_gradients_are_clipped_before_the_step_where_the_kernel_may_ignore_the_divisor(
    in_step: bool, monkeypatch: pytest.MonkeyPatch
):
    assert optimizer_module._CLIPS_IN_STEP == ("cpu", "cuda")
    monkeypatch.setattr(optimizer_module, "_CLIPS_IN_STEP", ("cpu",) if in_step else ())
    model = tiny_qwen3()
    optimizer = Optimizer(model, OptimConfig(clip_grad=0.5), total_steps=10, fp16=False)
    for end in (optimizer.step, optimizer.skip):
        fill_gradients(model, 0)
        optimizer.clip()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        assert norm > 1 if in_step else norm == pytest.approx(0.5)
        end()
        assert optimizer.inner.grad_scale is None, "the divisor is that of one step"  # pyright: ignore


def test_a_skipped_step_moves_nothing_and_too_many_stop_the_run():
    model = tiny_qwen3()
    config = OptimConfig(lr=1e-2, lr_decay_style="linear")
    dtypes: list[dict[str, Any]] = [{"bf16": True}, {"bf16": False}, {"fp16": True}]
    fixes = [Config(hf_checkpoint="x", **values).precision_fix for values in dtypes]
    optimizer = Optimizer(model, config, total_steps=10, fp16=False, fix=fixes[0])
    fill_gradients(model, 0)
    optimizer.clip()
    optimizer.step()
    before = [t.clone() for t in [*model.parameters(), *state_tensors(optimizer).values()]]
    lr = optimizer.lr
    for _ in range(MAX_SKIPPED):
        fill_gradients(model, 1, scale=math.inf)
        assert not math.isfinite(optimizer.clip().item())
        optimizer.skip()
    after = [*model.parameters(), *state_tensors(optimizer).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (optimizer.lr, optimizer.num_updates, optimizer.num_skipped) == (lr, 1, MAX_SKIPPED)
    fill_gradients(model, 1)
    optimizer.clip()
    optimizer.step()  # the limit is on steps in a row
    for _ in range(MAX_SKIPPED):
        optimizer.skip()
    line = "in a row: lower --lr or --clip-grad, compute with --no-bf16"
    for kl, cause in ((math.inf, "; loss/kl is infinite: choose --kl-loss-type low_var_kl"), (math.nan, "")):
        with pytest.raises(NumericsError, match=f"{line}{cause}$"):
            optimizer.end_step(math.inf, finite=False, kl=kl)
    assert fixes[1:] == ["", ", use --bf16 instead of --fp16"]


def overflowed(num_steps: int, optimizer: Optimizer | None = None) -> Optimizer:
    """After so many more steps in fp16 whose gradients are infinite."""
    optimizer = optimizer or Optimizer(tiny_qwen3(), OptimConfig(), total_steps=10, fp16=True)
    for _ in range(num_steps):
        optimizer.zero_grad()
        optimizer.scale(torch.tensor(1.0))
        fill_gradients(optimizer._model, 0, scale=math.inf)
        optimizer.clip()
        optimizer.skip()
    return optimizer


def test_skips_that_halve_the_loss_scale_are_no_failures_until_it_is_1():
    optimizer = overflowed(16)  # 65536 = 2^16
    assert (optimizer.num_skipped, optimizer.num_failed) == (16, 0)
    assert overflowed(1, optimizer).num_failed == 1


def test_state_survives_json_and_a_fresh_optimizer():
    optimizer = overflowed(1)
    state = json.loads(json.dumps(state_dict(optimizer)))
    fresh = Optimizer(tiny_qwen3(), OptimConfig(), total_steps=10, fp16=True)
    load_state_dict(fresh, state)
    assert state_dict(fresh) == state_dict(optimizer)
    assert fresh.scale(torch.tensor(1.0)).item() == 32768.0


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_the_plan_knows_the_state_of_each_optimizer(name: str):
    model = tiny_qwen3(hidden_size=256, intermediate_size=512, head_dim=64, num_key_value_heads=4)
    optim = OptimConfig(optimizer=name)
    state = state_tensors(Optimizer(model, optim, total_steps=10, fp16=False))
    planned = Shapes(model, Config(hf_checkpoint="x", optim=optim), 1).state()["optimizer state"]
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(planned, rel=0.01)


MATRICES = {  # of the first layer
    "gpt_oss": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router"}
    | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
}


@pytest.mark.parametrize("family", MATRICES)
def test_matrices_are_weights_of_linear_layers_routers_and_experts(family: str) -> None:
    model = zoo.meta(family)
    groups = parameter_groups({p: name for name, p in model.named_parameters()}, model, weight_decay=0.1)
    [matrices] = [[name for name, _ in group["params"]] for group in groups if group["kind"] == "matrix"]
    first = {name.split(".0.", 1)[1].removesuffix(".weight") for name in matrices if ".0." in name}
    assert first == MATRICES[family]


def user_optimizer(make: Any, model: Any = None) -> Optimizer:
    """The optimizer that a function of a user makes."""
    config = OptimConfig(optimizer="mine:make", lr=1e-2, lr_scale={"norm": 0.5})
    return Optimizer(model or tiny_qwen3(), config, total_steps=10, fp16=False, build=make)


def without_the_last(groups: Any, options: OptimConfig) -> torch.optim.Optimizer:
    groups[-1]["params"].pop()
    return torch.optim.NAdam(groups)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (without_the_last, r"leaves out 1 .*model\.norm\.weight"),
        (lambda groups, options: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), "leaves out"),
        (lambda groups, options: torch.optim.SGD([p for g in groups for _, p in g["params"]]), "drops `lr_scale`"),
        (lambda groups, options: None, "returns NoneType"),
        (lambda groups, options: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_is_no_optimizer_of_the_trained_parameters_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--optimizer mine:make .*{reason}") as caught:
        user_optimizer(make)
    assert "\n" not in str(caught.value)


def nadam_with_tensor_lr(groups: Any, options: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=torch.tensor(options.lr), foreach=False)


def test_state_is_created_for_a_resume_where_it_was_saved_and_a_learning_rate_stays_a_tensor() -> None:
    one, other = user_optimizer(nadam_with_tensor_lr), user_optimizer(nadam_with_tensor_lr)
    fill_gradients(one._model, 0)
    unused = [p for name, p in one._model.named_parameters() if "layers.1." in name]
    for p in unused:
        p.grad = None
    one.step()
    create_state(other, json.loads(json.dumps(state_dict(one))))
    assert state_tensors(other).keys() == state_tensors(one).keys()
    assert not any("layers.1." in name for name in state_tensors(other))
    assert all(isinstance(group["lr"], torch.Tensor) for group in other.inner.param_groups)


def test_a_checkpoint_whose_state_has_another_form_is_refused() -> None:
    saved = state_dict(Optimizer(tiny_qwen3(), OptimConfig(), total_steps=10, fp16=False))
    saved["tensors"].remove("model.norm.weight.exp_avg")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight\.exp_avg.*number of ranks"):
        create_state(Optimizer(tiny_qwen3(), OptimConfig(), total_steps=10, fp16=False), saved)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"freeze": ["self_atn.q_proj"]}, "--freeze self_atn.q_proj matches no .*names are self_attn.q_proj,"),
        ({"freeze": ["("]}, r"--freeze \( is not a regular expression: "),
        ({"freeze": ["norm", "w|b"]}, r"--freeze norm w\|b leaves no parameter to train"),
        ({"lr_scale": {"q_proj": 2.0, "attn": 0.5}}, "--lr-scale q_proj and attn both match model.layers.0"),
        ({"lr_scale": {"head": 0.0}}, "--lr-scale head=0 must be above 0: --freeze"),
        ({"freeze": ["lm_head"], "lr_scale": {"embed": 0.5}}, "--lr-scale embed matches no parameter that is trained"),
    ],
)
def test_names_that_choose_no_parameters_or_two_factors_are_refused_in_one_line(values, named):
    with pytest.raises(ConfigError, match=f"^{named}[^\n]*$"):
        choose_trained(zoo.meta("qwen2"), OptimConfig(**values))
