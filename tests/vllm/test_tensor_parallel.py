"""An engine that is spread over two ranks says what an engine of one rank says, and its weights are proven alike."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdptrain.errors import RolloutError
from fsdptrain.testing import save_tiny_checkpoint, spawn, tiny_tokenizer
from fsdptrain.types import Completion
from tests import zoo
from tests.distributed.test_sync_check import Courier, train_a_little
from tests.matrix import only
from tests.vllm import contract, models

VICTIMS = {
    "untied": ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"],
    "moe": ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.5.down_proj.weight"],
}


WHOLE = "model.norm.weight"


def said(options: dict, victims: list[str]) -> tuple[list[list[Completion]], list[str]]:
    """Of each rank to prompts of its own, of which one is the other's too, and to none; then what the check says of
    each of `victims` that came permuted, and of one that is not split and came wrong to one rank."""
    backend, engine, check = contract.build_checked(options)
    courier, made, errors = Courier(), [], []
    own = contract.PROMPTS[dist.get_rank() :][:2]

    def hand_over(version: int, fault: str = "", victim: str = "") -> None:
        train_a_little(backend, version)
        engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), fault, victim), version)
        check.check(version)

    for version, prompts in enumerate([own, own if dist.get_rank() else []]):
        hand_over(version)
        assert engine.checksums(courier.before).keys() == courier.before.keys()  # all can be read
        made.append(engine.generate(prompts, contract.SAMPLING))
    for version, victim in enumerate(victims, 2):
        with pytest.raises(RolloutError) as caught:
            hand_over(version, "permuted", victim)
        errors.append(str(caught.value))
    with pytest.raises(RolloutError) as caught:  # each rank holds a copy of its own: the other one sees nothing wrong
        hand_over(len(victims) + 2, "stale", WHOLE if dist.get_rank() == 1 else "")
    errors.append(str(caught.value))
    engine.close()
    return made, errors


@pytest.mark.parametrize("name", only(["moe"], VICTIMS))
def test_it_says_what_an_engine_of_each_rank_says_and_faults_are_named(tmp_path, name):
    options = contract.colocated(models.save(name, tmp_path))
    together = spawn(
        2, said, {**options, "rollout_engine_args": {"tensor_parallel_size": 2}}, VICTIMS[name], timeout=300
    )
    apart = spawn(2, said, options, [], timeout=300)
    for (made, errors), (expected, _) in zip(together, apart, strict=True):
        for found, wanted in zip([c for m in made for c in m], [c for m in expected for c in m], strict=True):
            assert (found.prompt_id, found.token_ids) == (wanted.prompt_id, wanted.token_ids)
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        for victim, error in zip([*VICTIMS[name], WHOLE], errors, strict=True):
            assert victim in error


COPIED = "model.layers.0.self_attn.k_proj.weight"


def with_copies(options: dict) -> tuple[list[str], timedelta]:
    """What the check says where the copy of a kv head came wrong to the second worker, and to the first; where a norm
    came stale to the second one at a first hand-over. And how long the workers wait for each other."""
    backend, engine, check = contract.build_checked(options)
    courier, errors = Courier(), []

    def hand_over(version: int, fault: str = "", victim: str = "") -> None:
        train_a_little(backend, version)
        engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), fault, victim), version)
        check.check(version)

    hand_over(0)
    assert engine.checksums(courier.before).keys() == courier.before.keys()
    faults = [(1, "permuted", COPIED), (0, "permuted", COPIED), (1, "stale", WHOLE)]  # by rank
    for version, (worker, fault, victim) in enumerate(faults, 1):
        if victim == WHOLE:
            check = contract.check_of(options, engine, backend)
        with pytest.raises(RolloutError) as caught:
            hand_over(version, fault, victim if dist.get_rank() == worker else "")
        errors.append(str(caught.value))
    hand_over(9)
    waits = engine._ranks._get_backend(torch.device("cpu")).options._timeout
    engine.close()
    return errors, waits


@pytest.mark.matrix
def test_a_copy_that_one_worker_has_wrong_is_named_whichever_it_is(tmp_path):
    folder = save_tiny_checkpoint(tmp_path, head_dim=32, num_key_value_heads=1, tie_word_embeddings=False)
    options = contract.colocated(folder, rollout_engine_args={"tensor_parallel_size": 2}, dist_timeout=77)
    for errors, waits in spawn(2, with_copies, options, timeout=300):
        for error, victim in zip(errors, [COPIED, COPIED, WHOLE], strict=True):
            assert f"does not hold {victim} of version" in error
        assert waits == timedelta(seconds=77)


SPLIT = "model.layers.0.linear_attn.dt_bias"  # a part on each worker, on a module that is not one of vLLM's own layers


def gated_deltas(options: dict) -> tuple[set[str], str]:
    """What cannot be read of a model whose workers hold parts of bare parameters, and what is said of a wrong part."""
    backend, engine, check = contract.build_checked(options)
    courier = Courier()
    for version in range(2):
        train_a_little(backend, version)
        engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), "", ""), version)
        check.check(version)
    unread = courier.before.keys() - engine.checksums(courier.before).keys()
    train_a_little(backend, 2)
    victim = SPLIT if dist.get_rank() == 1 else ""
    engine.update_weights(courier.carry(check.watch(backend.hf_weights("hub")), "permuted", victim), 2)
    with pytest.raises(RolloutError) as caught:
        check.check(2)
    engine.close()
    return unread, str(caught.value)


@pytest.mark.matrix
def test_parts_of_parameters_that_no_layer_of_vllm_splits_are_read_and_named(tmp_path):
    sizes = {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 1024}
    zoo.build("qwen3_next", 0, **sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    args = {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
    }  # which vLLM has on CPUs only in parts of prompts
    options = contract.colocated(tmp_path, rollout_engine_args=args, bf16=True)  # the only dtype of its kernel on CPUs
    for unread, said in spawn(2, gated_deltas, options, timeout=300):
        assert unread == set()
        assert f"does not hold {SPLIT} of version 2" in said
