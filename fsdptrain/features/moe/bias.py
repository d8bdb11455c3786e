"""The router bias that affects only the choice of experts and gets no gradient (DeepSeek-V3 and later models).

It is added to the scores before the choice and nowhere else: overloaded experts get a lower bias, and the weights of
the chosen experts still follow from their scores. Stock models store it as a buffer, which sharding leaves whole on
every rank. Checkpoints, export and weight sync treat it like a parameter. It is updated after an optimizer step from
the load of the experts over all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.config.rules import NoEffectError
from fsdptrain.errors import ConfigError
from fsdptrain.features.moe.balance import ExpertLoad, bias_change, count_choices, trained_tokens
from fsdptrain.features.moe.replay import RouterReplay
from fsdptrain.model.policy import MODEL_ERRORS
from fsdptrain.model.probes.random_copy import guarded_copy
from fsdptrain.model.structure import decoder_layers, expert_choice
from fsdptrain.types import Metrics, PackedBatch

_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases")  # names in transformers
_FLAG = "--router-bias-update-rate"
_TOKENS = 16
_SHIFT = 0.5  # added to all biases of a layer: must not change the choice
_PULL = 100.0  # added to one bias: larger than any score
_ROUNDING = 1e-4  # of logits


def choice_biases(model: PreTrainedModel) -> dict[int, Tensor]:
    """Return the bias buffer (E elements) of each decoder layer that has one, by layer index.

    Call it again after loading, which replaces buffers.
    """
    choice = expert_choice(model.config)
    if choice is None:
        return {}
    found = {}
    for index, layer in enumerate(decoder_layers(model)):
        own = [x for name, x in layer.named_buffers() if _is_bias(name) and x.numel() == choice.num_experts]
        if len(own) == 1:
            found[index] = own[0]
    return found


def check_bias(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Check on a small random copy, before loading, that the router bias can balance the experts.

    Raises NoEffectError for a model without such a bias, and ConfigError with the reason if the bias cannot balance.
    """
    name = config.model_type
    if expert_choice(config) is None:
        raise _no_effect(f"on {name}, which has no experts: remove it")
    try:
        refusal = _refusal_of(guarded_copy(config, trust_remote_code=trust_remote_code))
    except MODEL_ERRORS as error:
        refusal = f"its small copy fails, {type(error).__name__}: {error}"
    if refusal is None:
        raise _no_effect(
            f"on {name}, whose routers have no bias beside their scores: remove it, or use --router-aux-loss-coef"
        )
    if refusal:
        raise ConfigError(f"{_FLAG} does not work with {name}: {refusal}; remove it")


def _refusal_of(model: PreTrainedModel) -> str | None:
    """Return why the bias cannot be updated, "" if it can, or None if there is no bias."""
    frozen = [name for name, p in model.named_parameters() if _is_bias(name) and not p.requires_grad]
    if frozen:
        return f"{frozen[0]} is a parameter, rounded to the dtype of the others"
    known = {id(bias) for bias in choice_biases(model).values()}
    for name, buffer in model.named_buffers():
        if _is_bias(name) and id(buffer) not in known:
            return f"{name} is not the one bias of a decoder layer with a number for each expert"
    return bias_refusal(model) if known else None


@torch.no_grad()
def bias_refusal(model: PreTrainedModel) -> str:
    """Return why the biases of `model` (float32, on the CPU) do not affect only the choice, or ""."""
    choice, biases = expert_choice(model.config), choice_biases(model)
    assert choice is not None, "the caller has asked"
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(1, vocab_size, (_TOKENS, 1), generator=torch.Generator().manual_seed(0))
    replay = RouterReplay(model, choice)

    def logits() -> Tensor:
        with replay.choosing():
            return model(input_ids=tokens, use_cache=False).logits

    plain = logits()
    chosen = replay.choices_by_layer
    if max(chosen) > 1 or any(not chosen[index] for index in biases):
        return "a layer with a bias does not choose experts by one topk over all of them"
    for bias in biases.values():
        bias += _SHIFT
    if (logits() - plain).abs().max() > _ROUNDING:
        return "its bias moves the weights of experts, not only their choice"
    for bias in biases.values():
        bias.view(-1)[-1] += _PULL
    logits()
    routes = replay.routes
    if not all((routes[:, index] == choice.num_experts - 1).any(-1).all() for index in biases):
        return "an expert with a higher bias is not chosen"
    return ""


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] in _NAMES


def _no_effect(reason: str) -> NoEffectError:
    return NoEffectError(f"{_FLAG} has no effect {reason}", "router_bias_update_rate")


class RouterBiasUpdater:
    """Accumulates expert counts during an optimizer step and updates the router biases after it.

    An expert's bias increases by the rate if its load is below the mean of the step, and decreases if it is above. The
    bias is added to the scores before experts are chosen, and nowhere else.

    The load counts the choices of all tokens of sequences with a loss, on every rank, as made in the forward pass
    (replayed ones included), without recomputation. All ranks of a tensor or context group count their packs, which
    leaves relative loads unchanged. Counts are integers, so all ranks update their copy of a bias equally. If the
    optimizer skips a step, the bias is not updated.
    """

    def __init__(self, model: PreTrainedModel, *, rate: float) -> None:
        choice = expert_choice(model.config)
        assert choice is not None, "check_bias has asked"
        self._rate, self._top_k = rate, choice.top_k
        self._biases = choice_biases(model)
        device = next(iter(self._biases.values())).device
        self._counts = torch.zeros(len(decoder_layers(model)), choice.num_experts, dtype=torch.int64, device=device)

    def count(self, routes: Tensor | None, batch: PackedBatch) -> None:
        """Count the experts `routes` [T, layers, k] of the tokens of `batch`. Does not wait for the device."""
        assert routes is not None, "they were asked for"
        self._counts += count_choices(routes, trained_tokens(batch), self._counts.shape[1])

    def step(self, *, apply: bool) -> Metrics:
        """Update the biases, unless the optimizer skips its step. Returns the load of the step.

        Collective. Waits for the device.
        """
        dist.all_reduce(self._counts)
        if apply:
            for index, bias in self._biases.items():
                bias.add_(bias_change(self._counts[index]).view_as(bias), alpha=self._rate)
        load = ExpertLoad.of(self._counts.cpu(), num_tokens=1, top_k=self._top_k)
        return load.metrics() if load else {}
