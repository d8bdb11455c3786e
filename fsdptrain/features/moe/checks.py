"""Check on a small random copy of the model, before loading, that its routes can be replayed."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain.config.rules import NoEffectError
from fsdptrain.errors import ConfigError
from fsdptrain.features.moe.replay import RouterReplay
from fsdptrain.model.policy import MODEL_ERRORS
from fsdptrain.model.probes.random_copy import guarded_copy
from fsdptrain.model.sizes import ExpertChoice, expert_choice

_TOKENS = 16  # one sequence each, so that only its own experts affect the logits of a token
_ROUNDING = 1e-4  # of logits, if products are added in another order


def check_replay(config: PreTrainedConfig, mode: str, *, trust_remote_code: bool = False) -> None:
    """Raise NoEffectError for a model without experts, and ConfigError with the reason if routes cannot be replayed."""
    if expert_choice(config) is None:
        reason = f"on {config.model_type}, which has no experts: remove it"
        raise NoEffectError(f"--router-replay has no effect {reason}", "router_replay")
    try:
        refusal = replay_refusal(guarded_copy(config, trust_remote_code=trust_remote_code))
    except MODEL_ERRORS as error:
        refusal = f"its small copy fails, {type(error).__name__}: {error}"
    if refusal:
        raise ConfigError(f"--router-replay {mode} does not work with {config.model_type}: {refusal}; remove it")


def replay_refusal(model: PreTrainedModel) -> str:
    """Return why the routes of `model` (float32, on the CPU) cannot be replayed exactly, or ""."""
    choice = expert_choice(model.config)
    assert choice is not None, "the caller has asked"
    vocab_size, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocab_size, (_TOKENS, 1), generator=generator)
    replay = RouterReplay(model, choice)
    plain, plain_gradients = _run(model, tokens)
    with replay.choosing():
        model(input_ids=tokens, use_cache=False)
    if not any(replay.choices_by_layer):
        return "it chooses experts in another way than by one topk over all of them"
    if max(replay.choices_by_layer) > 1:
        return "a layer chooses experts more than once"
    with replay.choosing(replay.routes):
        found, gradients = _run(model, tokens)
    if not all(torch.equal(a, b) for a, b in zip([plain, *plain_gradients], [found, *gradients], strict=True)):
        return "with its own routes it computes something else"
    return _others_refusal(model, tokens, replay, choice)


def _others_refusal(model: PreTrainedModel, tokens: Tensor, replay: RouterReplay, choice: ExpertChoice) -> str:
    """Check replay of routes that the model would not choose: each given expert must count, in any order."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(tokens), len(replay.choices_by_layer), choice.num_experts)
    orders = torch.rand(shape, generator=generator).argsort(-1)
    given = orders[..., : choice.top_k]
    if choice.num_experts == choice.top_k:
        return "it always takes all experts"
    other = torch.cat([given[..., 1:], orders[..., choice.top_k : choice.top_k + 1]], dim=-1)  # one of k is different

    def logits(routes: Tensor) -> Tensor:
        with torch.no_grad(), replay.choosing(routes):
            return model(input_ids=tokens, use_cache=False).logits

    found = logits(given)
    if (found - logits(given.flip(-1))).abs().max() > _ROUNDING:
        return "the weights do not follow the experts"
    if (found - logits(other)).abs().amax((-2, -1)).min() == 0:
        return "an expert that it would not choose gets no weight"
    return ""


def _run(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the gradients of a scalar that depends on all of them."""
    logits = model(input_ids=tokens, use_cache=False).logits
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]  # a bias may be frozen
    gradients = torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)
    return logits.detach(), [gradient for gradient in gradients if gradient is not None]
