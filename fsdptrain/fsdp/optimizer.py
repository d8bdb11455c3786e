"""Optimizer steps over sharded parameters: learning rates, gradient clipping, skipped steps, fp16 loss scaling."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdptrain.config import OptimConfig
from fsdptrain.config.presets import is_custom
from fsdptrain.errors import CheckpointError, ConfigError, NumericsError
from fsdptrain.fsdp.optimizers import Build, build_optimizer, find_optimizer, parameter_groups
from fsdptrain.model.structure import reshard
from fsdptrain.types import Metrics

Schedule = Callable[[int], float]

MAX_SKIPPED = 10  # steps with gradients that are not finite, in a row, that end a run
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grads_with_norm_
_CLIPS_IN_STEP = ("cpu", "cuda")  # device types whose fused AdamW reads grad_scale; MPS ignores it

# Fraction of (lr - min_lr) left when a fraction `x` in [0, 1] of the decay is done.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


def lr_schedule(config: OptimConfig, *, total_steps: int) -> Schedule:
    """Return a function from the number of completed updates to the learning rate of the next update.

    With w warm-up and d decay updates (d is --lr-decay-iters, else `total_steps`), update k, counted from 0, uses:

      k <= w, w > 0   lr k/w, so that update 0 runs at 0
      constant        lr
      k > d           min_lr
      else            min_lr + c (lr - min_lr), where c is, with x = (k - w) / (d - w), linear 1 - x; cosine
                      (1 + cos(pi x)) / 2

    These are the definitions of Megatron-LM and slime. `config` must be validated.
    """
    decay_steps = config.lr_decay_iters or max(total_steps, 1)
    warmup_steps = config.lr_warmup_iters
    peak, floor = config.lr, config.min_lr

    def schedule(num_updates: int) -> float:
        if warmup_steps > 0 and num_updates <= warmup_steps:
            return peak * num_updates / warmup_steps
        if config.lr_decay_style == "constant":
            return peak
        if num_updates > decay_steps:
            return floor
        done = max(0.0, (num_updates - warmup_steps) / max(decay_steps - warmup_steps, 1))
        return floor + (peak - floor) * DECAYS[config.lr_decay_style](done)

    return schedule


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
    ) -> None:
        """`model` must already have its weights. The state is allocated here, so that steps need no more memory.

        masters: parameters to update instead of the model's, from which the caller creates them. total_norm:
        computes the gradient norm of these parameters over all ranks, if they are not DTensors. build: the function of
        --optimizer, if it was looked up before.
        """
        reshard(model)
        self._model = model
        self._config = config
        trained = model.named_parameters() if masters is None else masters.items()
        self._names = {p: name for name, p in trained if p.requires_grad}
        self._schedule = lr_schedule(config, total_steps=total_steps)
        groups = parameter_groups(self._names, model, config.weight_decay)
        self._optimizer = build_optimizer(build or find_optimizer(config), groups, config, self._names)
        self._host_adam = None
        if config.offload_optimizer:
            from fsdptrain.fsdp.host_adam import HostAdam

            assert isinstance(self._optimizer, torch.optim.AdamW), "the configuration refuses other optimizers"
            self._host_adam = HostAdam(self._optimizer)
        device_type = next(iter(self._names)).device.type
        is_adamw = type(self._optimizer) is torch.optim.AdamW and device_type in _CLIPS_IN_STEP
        fused = is_adamw and all(group["fused"] for group in self._optimizer.param_groups)
        self._steps_clip = fused and all(p.dtype == torch.float32 for p in self._names)  # its divisor is a float32
        self._scaler = torch.amp.GradScaler(device_type, enabled=fp16)
        self._norm_of = total_norm or _norm_over_meshes
        self.num_updates = 0  # completed steps of the schedule
        self.num_skipped = 0  # steps skipped for non-finite gradients, including those that find the fp16 loss scale
        self.num_failed = 0  # skipped steps in a row that a smaller loss scale does not explain

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._schedule(self.num_updates)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss for backward in fp16. Returns it unchanged otherwise."""
        return self._scaler.scale(loss)

    def clip(self) -> Tensor:
        """Clip to --clip-grad and return the global norm before clipping, [] on the device.

        On CPU and CUDA the fused kernel of AdamW divides float32 gradients while it reads them, so `step` clips them.
        Elsewhere, and for other optimizers, this does. Collective; does not wait for the device. The norm is the same
        on every rank. It is not finite if any gradient on any rank is not finite.
        """
        self._scaler.unscale_(self._optimizer)
        norm, limit = self._norm_of(list(self._names)), self._config.clip_grad
        if limit > 0 and self._steps_clip:
            self._optimizer.grad_scale = ((norm + _CLIP_EPS) / limit).clamp(min=1.0)  # pyright: ignore  # of GradScaler
        elif limit > 0:
            for members in _by_mesh(self._names):
                nn.utils.clip_grads_with_norm_(members, limit, norm)
        return norm

    def step(self) -> None:
        """Update the weights with the clipped gradients and free the gradients."""
        reshard(self._model)
        self._set_lr(self.lr)
        (self._host_adam or self._optimizer).step()
        self._finish()
        self.num_updates += 1
        self.num_failed = 0

    def skip(self, cause: str = "") -> None:
        """Drop the gradients. Raises NumericsError after more than MAX_SKIPPED unexplained skips in a row."""
        explained = self._scaler.is_enabled() and self._scaler.get_scale() > 1.0
        self._finish()
        self.num_skipped += 1
        self.num_failed += not explained
        if self.num_failed > MAX_SKIPPED:
            raise NumericsError(
                f"gradients were not finite in {self.num_failed} optimizer steps in a row: lower --lr or --clip-grad, "
                f"or compute with --no-bf16{cause}"
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
            self.skip("" if math.isfinite(kl) else "; loss/kl is not finite: choose --kl-loss-type low_var_kl")
        return metrics | {"optim/skipped_steps": float(self.num_skipped)}

    def _finish(self) -> None:
        if self._scaler.is_enabled():
            self._scaler.update()
        self._optimizer.grad_scale = None  # pyright: ignore  # of `clip`
        self.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer by parameter name, to save or load in place.

        Moments are DTensors; scalars, such as step counts, are views of shape [1].
        """
        found: dict[str, Tensor] = {}
        for p, name in self._names.items():
            for key, value in self._optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    kind = f"{type(value).__name__} {key!r}"
                    raise ConfigError(f"--optimizer {self._config.optimizer} keeps a {kind} as state: make it a tensor")
                found[f"{name}.{key}"] = value if value.ndim else value.view(1)
        return found

    def create_state(self, saved: Mapping[str, Any]) -> None:
        """Create the state that a checkpoint is loaded into, if the optimizer would create it in its first step.

        saved: what `state_dict` returned. Runs a step with learning rate 0 and gradients 0 of the parameters that had
        state, whose results are replaced by those of the checkpoint. Raises CheckpointError if the checkpoint lacks
        state.
        """
        if is_custom(self._config.optimizer) and not self._optimizer.state and saved["tensors"]:
            had_state = {key[:end] for key in saved["tensors"] for end, letter in enumerate(key) if letter == "."}
            for p, name in self._names.items():
                if name in had_state:
                    p.grad = torch.zeros_like(p)
            self._set_lr(0.0)
            self._optimizer.step()
            self.zero_grad()
        if missing := sorted(self.tensors().keys() - set(saved["tensors"])):
            raise CheckpointError(
                f"the checkpoint has no {missing[0]}: the state of --optimizer {self._config.optimizer} has another "
                "form on this number of ranks; resume on as many ranks as before"
            )

    def _set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            group["lr"] = group["lr"].fill_(scaled) if isinstance(group["lr"], Tensor) else scaled

    def state_dict(self) -> dict[str, Any]:
        """Return all state that is not a tensor. JSON-serializable."""
        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_failed": self.num_failed,
            "scaler": self._scaler.state_dict(),
            "tensors": list(self.tensors()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self.num_skipped = state["num_skipped"]
        self.num_failed = state["num_failed"]
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])


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
