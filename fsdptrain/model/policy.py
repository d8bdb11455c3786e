"""The policy's forward pass: a pack in, the log-probabilities of its labels out, all inside the root's forward.

Under FSDP2 the head's weight is whole only there, so the logprobs are made there too; every group keeps the hooks that
it has. The stock head stays reachable for one purpose, the self-check at start.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdptrain import platform
from fsdptrain.distributed import gather, one_line
from fsdptrain.errors import NumericsError
from fsdptrain.features.context_parallel.recurrent import GatheredMixer
from fsdptrain.features.context_parallel.ulysses import UlyssesGroup
from fsdptrain.features.model_parallel.logprobs import vocab_parallel_logprobs
from fsdptrain.features.moe.replay import RouterReplay
from fsdptrain.features.vision.tower import Vision
from fsdptrain.model.attention.attention import OURS
from fsdptrain.model.attention.masks import SkipMaskCreation
from fsdptrain.model.attention.rope import refuse_both_sides, rope_switch
from fsdptrain.model.inputs import Layout, from_rows, model_inputs, select_tokens, to_pack, to_rows, tokens_here
from fsdptrain.model.logprobs import HeadTransform, chunked_logprobs
from fsdptrain.model.structure import base_model, lm_head, reshard, stock_class
from fsdptrain.model.truncation import UNTRUNCATED, Truncation
from fsdptrain.types import NO_ROUTE, Images, LogProbs, PackedBatch, join_images, positions_of

# From the router logits [t, E] of each layer with experts, and the places [t] of their tokens in the pack, to a number,
# or a tensor, inside the root's forward. t is T; where tokens are dealt over ranks, those here, and results are summed.
RouterFunction = Callable[[Sequence[Tensor], Tensor], Tensor]

# Mean difference of a logprob between two exact ways of computing it. Half precision: what rounding of logits of
# magnitude 30 makes; a leak or a lost scale moves logprobs by far more.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}

# What may go wrong when a model is called in a way that it was not written for.
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    AssertionError,
    NumericsError,
)

# How configs name what the model does to its logits. The self-check proves the entry, or stops the run.
_SCALE_KEYS: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda x: x,  # cohere
    "lm_head_multiplier": lambda x: x,  # falcon_h1
    "logits_scaling": lambda x: 1.0 / x,  # granite
    "logits_mup_width_multiplier": lambda x: 1.0 / x,  # inkling
}
_MULTIPLIES_BY_LOGITS_SCALING = {"hyperclovax"}
_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # gemma, recurrent_gemma, xlstm


def install_policy_forward(
    model: PreTrainedModel,
    *,
    chunk_size: int,
    replay: RouterReplay | None = None,
    vision: Vision | None = None,
    context: UlyssesGroup | None = None,
    gathered: Sequence[GatheredMixer] = (),
) -> None:
    """Replace `model.forward`, before sharding: it then takes a PackedBatch, and is called by `policy_logprobs`.

    The new forward returns a tuple of tensors, because FSDP2 hangs its backward hooks on tensors in tuples and finds
    none in a record. chunk_size: tokens whose logits exist at a time. replay: makes the model take the experts of
    `batch.routes`, and report those that it took. vision: makes it see `batch.images`. context: ranks over which tokens
    are dealt; each of them is called with the whole pack, and returns what is said of all of it. gathered: mixers that
    need the tokens of all of these ranks.
    """
    stock = model.forward
    transform = head_transform(model.config)
    switch = rope_switch(model.config)
    pad_token_id = model.config.get_text_config().to_dict().get("pad_token_id")  # a few configs have no such key
    masks = SkipMaskCreation(OURS)

    def scored(
        batch: PackedBatch,
        *,
        layout: Layout,
        temperature: float = 1.0,
        truncation: Truncation = UNTRUNCATED,
        with_entropy: bool = False,
        with_routes: bool = False,
        router: RouterFunction | None = None,
        router_only: bool = False,
        stock_head: bool = False,
    ) -> tuple[Tensor, ...]:
        if switch is not None:
            refuse_both_sides(batch, switch)
        attention = str(model.config._attn_implementation)
        dealt = context if attention in OURS else None  # stock attention, which probes compare with, sees whole rows
        for mixer in gathered:
            mixer.active = dealt is not None
        inputs = model_inputs(batch, layout, attn_implementation=attention, pad_token_id=pad_token_id, context=dealt)
        positions = tokens_here(batch, layout, dealt, with_loss=True)
        tokens = tokens_here(batch, layout, dealt)
        nothing: Tensor | None = None
        if vision is not None:
            seen, nothing = vision.see(batch, layout)
            inputs |= seen
        if stock_head:
            logits = select_tokens(stock(**inputs).logits, batch, layout, positions, context=dealt)
            return (to_pack(_stock_logprobs(logits, batch.labels[positions]), positions, batch, context=dealt),)
        routing = _choosing(replay, batch, layout, dealt, with_routes=with_routes)
        with routing, masks((attention, layout, batch.images is None)):
            output = base_model(model)(**inputs, **({"output_router_logits": True} if router else {}))
        extra: list[Tensor] = []
        if router is not None:
            logits = [from_rows(x.flatten(0, -2), batch, layout, tokens, context=dealt) for x in output.router_logits]
            said = router(logits, tokens)
            extra.append(said if dealt is None else dealt.total(said))
            if router_only:
                return tuple(extra)
        if with_routes:
            assert replay is not None, "routes are known where install_policy_forward got a RouterReplay"
            routes = from_rows(replay.routes.int(), batch, layout, tokens, context=dealt)  # gloo has no int16
            extra.append(to_pack(routes, tokens, batch, context=dealt).to(torch.int16))
        hidden = output.last_hidden_state if nothing is None else output.last_hidden_state + nothing
        found = _scorer(lm_head(model))(
            select_tokens(hidden, batch, layout, positions, context=dealt),
            labels=batch.labels.index_select(0, positions),
            temperature=temperature,
            softcap=transform.softcap,
            logit_scale=transform.logit_scale,
            truncation=truncation,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
        )
        return (*(to_pack(x, positions, batch, context=dealt) for x in found if x is not None), *extra)

    model.forward = capture_model_errors(scored)


def _choosing(
    replay: RouterReplay | None, batch: PackedBatch, layout: Layout, context: UlyssesGroup | None, *, with_routes: bool
) -> AbstractContextManager[None]:
    """Inside, routers take the experts of `batch.routes` and remember theirs, where either is asked for."""
    if replay is None or (batch.routes is None and not with_routes):
        return nullcontext()
    if batch.routes is None:
        return replay.choosing(None)
    return replay.choosing(to_rows(batch.routes, batch, layout, fill=NO_ROUTE, context=context))


def _scorer(head: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`chunked_logprobs` with the weights of `head`, or what stands for it where they are split over ranks."""
    parameters = dict(head.named_parameters(recurse=False))
    weight = parameters["weight"]
    function = vocab_parallel_logprobs if isinstance(weight, DTensor) else chunked_logprobs
    return partial(function, weight=weight, bias=parameters.get("bias"))


def capture_model_errors(scored: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward that puts what the model refuses to compute into `refusals`, where the caller has passed a list."""

    def forward(batch: PackedBatch, *, refusals: list[Exception] | None = None, **options: Any) -> tuple[Tensor, ...]:
        try:
            return scored(batch, **options)
        except MODEL_ERRORS as error:
            if refusals is None or isinstance(error, torch.OutOfMemoryError):  # which says nothing of the model
                raise
            refusals.append(error)  # caught inside the root's forward, which leaves FSDP2 in order
            return (torch.zeros(batch.num_tokens, device=batch.input_ids.device),)

    return forward


def policy_logprobs(
    model: PreTrainedModel,
    batch: PackedBatch,
    *,
    layout: Layout,
    temperature: float = 1.0,
    truncation: Truncation = UNTRUNCATED,
    with_entropy: bool = False,
    with_routes: bool = False,
    router: RouterFunction | None = None,
) -> LogProbs:
    """Score the labels of `batch`, which lies on the device of the computation. Collective where the model is sharded.

    The head runs only at `batch.loss_positions`; elsewhere values and entropy are 0, without gradient. Temperature and
    truncation are those that the labels were sampled with. `router` makes `LogProbs.router_loss`.
    """
    found = iter(
        model(
            batch,
            layout=layout,
            temperature=temperature,
            truncation=truncation,
            with_entropy=with_entropy,
            with_routes=with_routes,
            router=router,
        )
    )
    return LogProbs(
        values=next(found),
        entropy=next(found) if with_entropy else None,
        router_loss=next(found) if router else None,
        routes=next(found) if with_routes else None,
    )


def score_or_refusal(model: PreTrainedModel, batch: PackedBatch, layout: Layout) -> tuple[Tensor, str]:
    """Logprobs [T], and the words of the first rank that could not make them. Collective."""
    refusals: list[Exception] = []
    values = model(batch, layout=layout, refusals=refusals)[0]
    said = next((words for words in gather(one_line(refusals[0]) if refusals else None) if words), "")
    reshard(model)
    return values, said


def router_statistic(model: PreTrainedModel, batch: PackedBatch, router: RouterFunction, *, layout: Layout) -> Tensor:
    """What `router` makes of the router logits of one forward pass without the head. Collective like the above."""
    return model(batch, layout=layout, router=router, router_only=True)[0]


def head_transform(config: PreTrainedConfig) -> HeadTransform:
    """What the config says that the model does to its logits."""
    text = config.get_text_config()
    scale = 1.0
    for key, factor in _SCALE_KEYS.items():
        value = getattr(text, key, None)  # minicpm3 computes it
        if value is not None:
            scale *= value if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING else factor(value)
    values = text.to_dict()
    softcap = next((values[key] for key in _SOFTCAP_KEYS if values.get(key) is not None), None)
    return HeadTransform(logit_scale=scale, softcap=softcap)


@torch.no_grad()
def check_head(
    model: PreTrainedModel,
    *,
    vocab_size: int,
    layout: Layout,
    compute_dtype: torch.dtype,
    device: torch.device | None = None,
) -> float:
    """Compare the chunked logprobs with those of the stock model on a few random tokens. Collective.

    Returns the mean difference, the largest over ranks. Raises NumericsError on every rank where it is over the
    tolerance of `compute_dtype`: then the model does something to its logits that `head_transform` does not know.
    """
    batch = _random_pack(vocab_size, device)
    with evaluating(model):
        ours = policy_logprobs(model, batch, layout=layout).values
        stock = model(batch, layout=layout, stock_head=True)[0]
    reshard(model)
    difference = over_ranks((ours - stock).abs().sum().item() / (batch.num_tokens - 1))
    tolerance = TOLERANCES[compute_dtype]
    if not difference <= tolerance:
        raise NumericsError(
            f"the logprobs of {stock_class(model).__name__} differ by {difference:.2g} from those of its stock head "
            f"(tolerance {tolerance:g}, {compute_dtype}): it changes its logits in an unknown way; add the key of "
            "its config to fsdptrain/model/policy.py, or choose another --hf-checkpoint"
        )
    return difference


def check_backward(
    model: PreTrainedModel,
    *,
    vocab_size: int,
    layout: Layout,
    device: torch.device | None = None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """One backward pass over a few random tokens, whose gradients `look` may look at before they are dropped.

    Collective.

    Raises NumericsError, on every rank alike, for a model that can score and not be trained (reformer; a kernel without
    a backward), and not in the middle of the first step.
    """
    batch = _random_pack(vocab_size, device)
    try:
        with evaluating(model):
            policy_logprobs(model, batch, layout=layout).values.sum().backward()
    except MODEL_ERRORS as error:  # of the model's own code, which is the same on every rank
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise NumericsError(f"{stock_class(model).__name__} cannot be trained: {one_line(error)}") from error
    reshard(model)
    look()
    for parameter in model.parameters():
        parameter.grad = None


def _random_pack(vocab_size: int, device: torch.device | None) -> PackedBatch:
    tokens = torch.randint(vocab_size, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    return plain_batch([tokens], device=device or platform.local_device())


def plain_batch(
    segments: list[list[int]], *, device: torch.device, images: Sequence[Images | None] = ()
) -> PackedBatch:
    """A pack of whole token lists with a loss on every next token: for checks, which need no samples and no weights."""
    tokens = torch.tensor([token for segment in segments for token in segment])
    seqlens = tuple(len(segment) for segment in segments)
    ends = torch.tensor(seqlens).cumsum(0)
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[ends - 1] = False
    zeros, positions = torch.zeros(len(tokens)), positions_of(mask)
    return PackedBatch(
        input_ids=tokens,
        labels=tokens.roll(-1) * mask,
        position_ids=torch.cat([torch.arange(length) for length in seqlens]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        seqlens=seqlens,
        loss_mask=mask,
        loss_positions=positions,
        loss_places=positions.numpy(),
        loss_weights=mask.float(),
        advantages=zeros,
        rollout_logprobs=zeros,
        num_loss_tokens=int(mask.sum()),
        images=join_images(list(zip(images, seqlens, strict=True))) if images else None,
    ).to(device)


class evaluating:  # noqa: N801 - reads as a verb: `with evaluating(model): ...`
    """Dropout off, and back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.was_training = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)


def over_ranks(value: float) -> float:
    """The largest `value` of any rank; nan where any has nan. Collective."""
    values = gather(value)
    return next((x for x in values if x != x), max(values))


def _stock_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """[M] from the logits [M, V] of a stock model; few tokens only, since they are whole here."""
    return logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
