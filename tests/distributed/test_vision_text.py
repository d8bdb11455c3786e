"""Text prompts on a vision-language checkpoint: the tower is there, frozen, sharded, and goes through unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdptrain.algo.weights import Totals
from fsdptrain.config import Config
from fsdptrain.data.packing.pack import pack
from fsdptrain.fsdp.backend import FSDPBackend
from fsdptrain.model.structure import decoder_layers, freeze_vision, tower_layers
from fsdptrain.rollout.embedded.engine import build_hf_engine
from fsdptrain.testing import spawn
from fsdptrain.types import LossConfig, LossOutput, Prompt, Sample, SamplingParams
from tests import vision_zoo as zoo

TOTALS = Totals(num_tokens=20, num_sequences=4)


def samples() -> list[Sample]:
    """One of them says the token that stands for an image, which shows none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate((9, 30, 14, 21)):
        ids = torch.randint(5, 260, (length,), generator=generator).tolist()
        ids[-3] = zoo.IMAGE_TOKEN_ID if number == 1 else ids[-3]
        mask = [False] * (length - 5) + [True] * 5
        made.append(Sample(f"p{number}", ids, mask, [0.0] * length, advantage=number - 1.5))
    return made


def loss(batch, logprobs, config) -> LossOutput:
    total = (batch.loss_weights * batch.advantages * logprobs.values).sum()
    return LossOutput(total, {"loss": total.detach()})


def files(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def one_run(folder: Path, strategy: str) -> dict[str, Any]:
    config = Config(
        hf_checkpoint=str(folder), bf16=False, lr=1e-2, kl_loss_coef=0.1, clip_grad=0.0, load_strategy=strategy
    )
    backend = FSDPBackend(config, total_steps=1)
    found: dict[str, Any] = {"sharded": all(isinstance(x, FSDPModule) for x in tower_layers(backend.model))}
    found["layers"] = len(tower_layers(backend.model)), len(decoder_layers(backend.model))
    found["optimized"] = len(backend._optimizer.tensors()) // 3
    backend.export(folder.parent / f"same-{strategy}-{folder.name}")
    mine = samples()[dist.get_rank() :: dist.get_world_size()]
    packs = [pack(mine, aggregation="token_mean", totals=TOTALS, max_response_len=5)]
    before = backend.score(packs, "policy")[0].values
    grads: dict[str, Tensor] = {}

    def keep() -> Tensor:
        grads.update(
            {n: p.grad.full_tensor().clone() for n, p in backend.model.named_parameters() if p.grad is not None}
        )
        return torch.zeros(())

    backend._optimizer.clip = keep
    backend.train_step(packs, loss, LossConfig())
    found["gradients"] = grads
    found["moved"] = (backend.score(packs, "policy")[0].values - before).abs().max().item()
    found["reference"] = (backend.score(packs, "reference")[0].values - before).abs().max().item()
    backend.export(folder.parent / f"trained-{strategy}-{folder.name}")
    found["agreement"] = engine_agreement(config, backend)
    return found


def engine_agreement(config: Config, backend: FSDPBackend) -> float:
    engine = build_hf_engine(config, checkpoint=backend.checkpoint_path, device=backend.device)
    engine.update_weights(backend.hf_weights(engine.weight_naming), 1)
    prompts = [Prompt(f"{i}", [5 + i] * length, "") for i, length in enumerate([3, 17])]
    made = []
    for i, completion in enumerate(engine.generate(prompts, SamplingParams(num_samples=2, max_tokens=20))):
        prompt, response = prompts[i // 2].token_ids, completion.token_ids
        mask = [False] * len(prompt) + [True] * len(response)
        made.append(Sample(completion.prompt_id, prompt + response, mask, [0.0] * len(prompt) + completion.logprobs))
    batch = pack(made, aggregation="token_mean", totals=Totals(1000, 100), max_response_len=20)
    [logprobs] = backend.score([batch], "policy")
    return (logprobs.values - batch.rollout_logprobs)[batch.loss_mask].abs().max().item()


def all_runs(folders: list[Path], strategy: str) -> list[dict[str, Any]]:
    return [one_run(folder, strategy) for folder in folders]


def plain_gradients(name: str) -> dict[str, Tensor]:
    model = zoo.build(name)
    freeze_vision(model)
    for sample in samples():
        ids = torch.tensor([sample.token_ids])
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0] * torch.tensor(sample.loss_mask[1:])
        (chosen * sample.advantage / TOTALS.num_tokens).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("strategy", "families"), [("shard", zoo.FAMILIES), ("rank0", ("qwen2_5_vl",))])
def test_text_trains_the_language_model_alone(tmp_path: Path, strategy: str, families: tuple[str, ...]):
    folders = [zoo.save(tmp_path / name, name) for name in families]
    for name, folder, found in zip(families, folders, spawn(2, all_runs, folders, strategy)[0], strict=True):
        assert found["sharded"]
        assert found["layers"] == (2, 2)
        wanted = plain_gradients(name)
        assert found["gradients"].keys() == wanted.keys()
        assert found["optimized"] == len(wanted)
        largest = max(gradient.abs().max() for gradient in wanted.values())
        assert max((found["gradients"][key] - wanted[key]).abs().max() / largest for key in wanted) < 2e-6, name
        assert found["moved"] > 1e-3
        assert found["reference"] == 0.0
        assert found["agreement"] < 1e-5

        before = files(folder)
        same, trained = (files(tmp_path / f"{kind}-{strategy}-{name}") for kind in ("same", "trained"))
        assert before.keys() == same.keys() == trained.keys()
        assert all(torch.equal(before[key], same[key]) for key in before)
        changed = {key for key in before if not torch.equal(before[key], trained[key])}
        assert changed
        assert not any("vis" in key or "projector" in key for key in changed)
