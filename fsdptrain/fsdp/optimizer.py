"""Optimizer steps over sharded parameters: learning rates, gradient clipping, skipped steps, fp16 loss scaling."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdptrain.config import OptimConfig
from fsdptrain.errors import NumericsError
from fsdptrain.fsdp.optimizers import OPTIMIZERS, Build, find_optimizer, parameter_groups
from fsdptrain.model.structure import reshard
from fsdptrain.types import Metrics

MAX_SKIPPED = 10  # steps with gradients that are not finite, in a row, that end a run
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grads_with_norm_
_CLIPS_IN_STEP = ("cpu", "cuda")  # device types whose fused AdamW reads grad_scale; MPS ignores it


class Optimizer:
    """An optimizer of `optimizers.py` with a learning-rate schedule, a loss scale and counters of skipped steps.

    A step is `zero_grad`, backward passes of `scale(loss)`, `clip`, and then `step` if the norm is finite on every
    rank, else `skip`. Vectors (norms, biases) have no weight decay. A skipped step changes neither the state of the
    optimizer nor the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        *,
        total_steps: int,
        fp16: bool,
        masters: Mapping[str, nn.Parameter] | None = None,
        total_norm: Callable[[list[nn.Parameter]], Tensor] | None = None,
        build: Build | None = None,
        fix: str = "",
    ) -> None:
        """`model` must already have its weights. The state is allocated here, so that steps need no more memory.

        masters: parameters to update instead of the model's, from which the caller creates them. total_norm:
        computes the gradient norm of these parameters over all ranks, if they are not DTensors. build: the function of
        --optimizer, if it was looked up before. fix: `Config.precision_fix`.
        """
        reshard(model)
        self._model = model
        self.config, self._fix = config, fix
        trained = model.named_parameters() if masters is None else masters.items()
        self.names = {p: name for name, p in trained if p.requires_grad}
        self._lr_after: Callable[[int], float] = lambda num_updates: config.lr
        if config.lr_warmup_iters or config.lr_decay_style != "constant":
            from fsdptrain.fsdp.schedule import lr_schedule

            self._lr_after = lr_schedule(config, total_steps=total_steps)
        groups = parameter_groups(self.names, model, config.weight_decay)
        build = build or find_optimizer(config)
        if config.optimizer in OPTIMIZERS:
            self.inner = build(groups, config)
        else:
            from fsdptrain.fsdp.custom_optimizer import build_optimizer

            self.inner = build_optimizer(build, groups, config, self.names)
        self._host_adam = None
        if config.offload_optimizer:
            from fsdptrain.fsdp.host_adam import HostAdam

            assert isinstance(self.inner, torch.optim.AdamW), "the configuration rejects other optimizers"
            self._host_adam = HostAdam(self.inner)
        device_type = next(iter(self.names)).device.type
        is_adamw = type(self.inner) is torch.optim.AdamW and device_type in _CLIPS_IN_STEP
        fused = is_adamw and all(group["fused"] for group in self.inner.param_groups)
        self._steps_clip = fused and all(p.dtype == torch.float32 for p in self.names)  # its divisor is a float32
        self.scaler = torch.amp.GradScaler(device_type, enabled=fp16)
        self._norm_of = total_norm or _norm_over_meshes
        self.num_updates = 0  # completed steps of the schedule
        self.num_skipped = 0  # steps skipped for non-finite gradients, including those that find the fp16 loss scale
        self.num_failed = 0  # skipped steps in a row that a smaller loss scale does not explain

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._lr_after(self.num_updates)

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss for backward in fp16. Returns it unchanged otherwise."""
        return self.scaler.scale(loss)

    def clip(self) -> Tensor:
        """Clip to --clip-grad and return the global norm before clipping, [] on the device.

        On CPU and CUDA the fused kernel of AdamW divides float32 gradients while it reads them, so `step` clips them.
        Elsewhere, and for other optimizers, this does. Collective; does not wait for the device. The norm is the same
        on every rank. It is not finite if any gradient on any rank is not finite.
        """
        self.scaler.unscale_(self.inner)
        norm, limit = self._norm_of(list(self.names)), self.config.clip_grad
        if limit > 0 and self._steps_clip:
            self.inner.grad_scale = ((norm + _CLIP_EPS) / limit).clamp(min=1.0)  # pyright: ignore  # of GradScaler
        elif limit > 0:
            for members in _by_mesh(self.names):
                nn.utils.clip_grads_with_norm_(members, limit, norm)
        return norm

    def step(self) -> None:
        """Update the weights with the clipped gradients and free the gradients."""
        reshard(self._model)
        self.set_lr(self.lr)
        (self._host_adam or self.inner).step()
        self._finish()
        self.num_updates += 1
        self.num_failed = 0

    def skip(self, cause: str = "") -> None:
        """Drop the gradients. Raises NumericsError after more than MAX_SKIPPED unexplained skips in a row."""
        explained = self.scaler.is_enabled() and self.scaler.get_scale() > 1.0
        self._finish()
        self.num_skipped += 1
        self.num_failed += not explained
        if self.num_failed > MAX_SKIPPED:
            raise NumericsError(
                f"gradients were not finite in {self.num_failed} optimizer steps in a row: lower --lr or "
                f"--clip-grad{self._fix}{cause}"
            )

    def advance_without_update(self) -> Metrics:
        """Advance the schedule without an update, for a step without loss tokens."""
        metrics = {"optim/lr": self.lr, "optim/skipped_steps": float(self.num_skipped)}
        self.zero_grad()
        self.num_updates += 1
        return metrics

    def end_step(self, norm: float, *, finite: bool, kl: float = 0.0) -> Metrics:
        """Call `step` if the gradients are finite on every rank, else `skip`. Returns the metrics of the step.

        kl: loss/kl, for messages
        """
        metrics = {"optim/lr": self.lr}
        if finite:
            self.step()
            metrics["optim/grad_norm"] = norm
        else:
            self.skip("; loss/kl is infinite: choose --kl-loss-type low_var_kl" if math.isinf(kl) else "")
        return metrics | {"optim/skipped_steps": float(self.num_skipped)}

    def _finish(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.update()
        self.inner.grad_scale = None  # pyright: ignore  # of `clip`
        self.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            group["lr"] = torch.full_like(group["lr"], scaled) if isinstance(group["lr"], Tensor) else scaled


def _by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by mesh: torch rejects tensors of several meshes in one call."""
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in params:
        found.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(found.values())


def _norm_over_meshes(params: list[nn.Parameter]) -> Tensor:
    gradients = ([p.grad for p in members if p.grad is not None] for members in _by_mesh(params))
    norms = [nn.utils.get_total_norm(each) for each in gradients]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()
