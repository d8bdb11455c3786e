"""Vision-language models on real ranks compute what the plain Hugging Face model computes, one sequence at a time."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from fsdptrain.algo.weights import Totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.features.vision.processor import ImageProcessor
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.model.structure import freeze_vision
from fsdptrain.types import Images, LossConfig, LossOutput, Prompt, Sample, SamplingParams
from tests import agreement
from tests import vision_zoo as zoo
from tests.exact import Exact, backends_in_float64, in_float64
from tests.matrix import only
from tests.testing import spawn

from .test_fsdp_backend import keep_gradients

FEW = ["qwen3_vl", "gemma3"]  # packed and padded
TRAINED = ("qwen3_vl", "qwen2_5_vl")  # of these the tower too
COLORS = {"red": (255, 0, 0), "grey": (90, 90, 90), "blue": (10, 20, 250)}
SIZES = {"red": (16, 16), "grey": (24, 16), "blue": (16, 32)}
TOLERANCE = 1e-11  # in float64, of the largest gradient: only the order of summation differs


def samples_and_images(folder: Path) -> tuple[list[Sample], dict[str, Images]]:
    """Four prompts and answers: two with one picture each, one with two pictures, one without.

    One answer holds the token that stands for an image. In a response it is a token like any other.
    """
    processor = ImageProcessor(folder, trust_remote_code=False, image_key="images")
    only_start = processor._processor.image_token == "<|vision_start|>"
    place = "<|vision_start|>" + ("" if only_start else "<|image_pad|><|vision_end|>")
    shown = [["red"], ["grey"], ["blue", "red"], []]
    samples, images = [], {}
    for number, names in enumerate(shown):
        pictures = [zoo.picture(COLORS[name], SIZES[name]) for name in names]
        prompt = processor.read(f"ab{place * len(names)} {number}?", pictures)
        answer = [70 + number, 90, zoo.IMAGE_TOKEN_ID if number == 1 else 91, 92 + 3 * number]
        mask = [False] * len(prompt.token_ids) + [True] * len(answer)
        samples.append(
            Sample(f"p{number}", [*prompt.token_ids, *answer], mask, [0.0] * len(mask), advantage=number - 1.5)
        )
        if prompt.images is not None:
            images[f"p{number}"] = prompt.images
    return samples, images


def loss(batch, logprobs, config) -> LossOutput:
    total = (batch.loss_weights * batch.advantages * logprobs.values).sum()
    return LossOutput(total, {"loss": total.detach()})


TOTALS = Totals(num_tokens=16, num_sequences=4)
ROUNDED = 4 * torch.finfo(torch.float32).eps  # gradients of adapters are float32


def trained(
    folder: Path, whose: list[list[list[int]]], *, train_vision: bool, mode: type = Exact, **options
) -> dict[str, Tensor]:
    """The gradient of every parameter after the packs `whose`[rank] of samples, computed under `mode`."""
    samples, images = samples_and_images(folder)
    flags = {"bf16": False, "image_key": "images", "train_vision": train_vision, "clip_grad": 0.0, **options}
    backend = FSDPBackend(Config(hf_checkpoint=str(folder), **flags), total_steps=1)
    gradients = keep_gradients(backend._optimizer)
    with mode():
        packs = [
            pack(
                [samples[i] for i in chosen], aggregation="token_mean", totals=TOTALS, max_response_len=4, images=images
            )
            for chosen in whose[dist.get_rank()]
        ]
        backend.train_step(packs, loss, LossConfig())
    return gradients


def plain_gradients(name: str, folder: Path, *, train_vision: bool) -> dict[str, Tensor]:
    """Of the plain model and its own forward, in float64, one sequence after the other."""
    model = in_float64(zoo.build(name))
    if not train_vision:
        freeze_vision(model)
    samples, images = samples_and_images(folder)
    with Exact():
        for sample in samples:
            plain_loss(name, model, sample, images.get(sample.group_id)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_loss(name: str, model: PreTrainedModel, sample: Sample, seen: Images | None) -> Tensor:
    ids = torch.tensor([sample.token_ids])
    arguments = {}
    if seen is not None:
        types = torch.zeros_like(ids)
        types[0, : len(seen.token_types)] = seen.token_types
        arguments = {**seen.inputs, "token_type_ids" if name == "gemma3" else "mm_token_type_ids": types}
    said = [i for i, token in enumerate(sample.token_ids) if token == zoo.IMAGE_TOKEN_ID and sample.loss_mask[i]]
    if said:  # the stock model takes it for a picture: it gets another token with the embedding of this one
        ids[0, said] = 200
        rows = model.get_input_embeddings()
        word = rows.forward(torch.tensor(zoo.IMAGE_TOKEN_ID))

        def swap(module, args, output, said=said, word=word):
            return torch.cat([output[:, : said[0]], word[None, None], output[:, said[0] + 1 :]], dim=1)

        handle = rows.register_forward_hook(swap)
    logits = model(input_ids=ids, use_cache=False, **arguments).logits[0, :-1]
    if said:
        handle.remove()
    labels = torch.tensor(sample.token_ids[1:])
    chosen = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return (chosen * torch.tensor(sample.loss_mask[1:]) * sample.advantage / TOTALS.num_tokens).sum()


def all_families(folders: list[Path], whose: list) -> list[dict[str, Tensor]]:
    backends_in_float64()
    return [trained(folder, whose, train_vision=folder.name in TRAINED) for folder in folders]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("vision")
    return {name: zoo.save(parent / name, name) for name in zoo.FAMILIES}


@pytest.mark.parametrize("names", only([FEW], [FEW, sorted({*zoo.FAMILIES} - {*FEW})]), ids=" ".join)
def test_gradients_are_those_of_the_plain_model_one_by_one(folders, names):
    """With images on one of two ranks."""
    found_by_rank = spawn(2, all_families, [folders[name] for name in names], [[[0, 2, 1]], [[3]]])
    for name, found in zip(names, found_by_rank[0], strict=True):
        wanted = plain_gradients(name, folders[name], train_vision=name in TRAINED)
        assert found.keys() == wanted.keys()
        assert any("vis" in key for key in found) == (name in TRAINED)
        largest = max(gradient.abs().max() for gradient in wanted.values())
        worst = {key: ((found[key] - wanted[key]).abs().max() / largest).item() for key in wanted}
        assert max(worst.values()) < TOLERANCE, (name, worst)


def adapted(folder: Path, whose: list[list[list[int]]], target: str) -> dict[str, Tensor]:
    backends_in_float64()
    options = {"lora_rank": 4, "lora_targets": ["all-linear", target]}
    return trained(folder, whose, train_vision=False, **options)


def test_an_adapter_of_the_tower_does_not_depend_on_who_has_images(folders):
    """In each pack one of two ranks has one. The embedding is frozen: on the other nothing but the blank image leads
    to the tower, whose gradients are reduced in the same order there."""
    folder = folders["qwen3_vl"]
    [wanted] = spawn(1, adapted, folder, [[[0], [3], [1]]], "attn.qkv")
    for found in spawn(2, adapted, folder, [[[0], [3]], [[3], [1]]], "attn.qkv"):
        assert any("visual" in name for name in found)
        assert found.keys() == wanted.keys()
        once_more = [name for name in found if "visual" in name]  # sample 3, which both have, has no image
        largest = max(wanted[name].abs().max() for name in once_more)
        assert max((found[name] - wanted[name]).abs().max() / largest for name in once_more) < ROUNDED


def engine_differences(folders: list[Path]) -> list[float]:
    backends_in_float64()
    return [engine_difference(folder) for folder in folders]


def engine_difference(folder: Path) -> float:
    """For prompts with and without images together."""
    config = Config(
        hf_checkpoint=str(folder), rollout_engine="hf", bf16=False, image_key="images", rollout_temperature=0.7
    )
    samples, images = samples_and_images(folder)
    prompts = [
        Prompt(s.group_id, s.token_ids[: s.loss_mask.index(True)], "", images=images.get(s.group_id)) for s in samples
    ]
    mine = agreement.of_this_rank(prompts) if dist.get_rank() else prompts
    sampling = SamplingParams(num_samples=2, max_tokens=8, temperature=0.7)
    return agreement.push_and_compare(*agreement.build(config), mine, sampling, images=images, mode=Exact)


def test_engine_and_trainer_agree_on_every_sampled_token(folders):
    for found in spawn(2, engine_differences, [folders[name] for name in FEW]):
        assert found == pytest.approx([0.0] * len(FEW), abs=1e-12)
