"""The memory, the cores and the device of a process."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.cores import usable_cores
from fsdptrain.errors import ConfigError
from fsdptrain.memory import report
from fsdptrain.memory.report import host_memory
from fsdptrain.platform import _check_device
from fsdptrain.random_state import device_rng_state, set_device_rng_state
from fsdptrain.rank_variables import read_rank_variables
from tests.testing import rank_variables


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = host_memory()  # of this machine
    assert 0 <= free <= total
    monkeypatch.setattr(report, "_CGROUP", tmp_path)
    for name, value in (("memory.current", "1000"), ("memory.max", "1500")):
        (tmp_path / name).write_text(value)
    assert host_memory() == (500, 1500)
    (tmp_path / "memory.max").write_text("max")
    assert host_memory()[1] > 1500


@pytest.mark.parametrize(("limit", "most"), [("max 100000", 10**6), ("150000 100000", 2), ("50000 100000", 1)])
def test_the_cpu_limit_of_any_control_group_applies(tmp_path: Path, limit: str, most: int):
    group = tmp_path / "cgroup" / "job" / "step"
    group.mkdir(parents=True)
    (group.parent / "cpu.max").write_text(f"{limit}\n")
    (group / "cpu.max").write_text("max 100000\n")
    (tmp_path / "membership").write_text("0::/job/step\n")
    assert usable_cores(tmp_path / "membership", tmp_path / "cgroup") == min(len(os.sched_getaffinity(0)), most)


def test_a_process_bound_to_one_core_has_one(tmp_path: Path):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path / "none", tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_more_processes_than_devices_are_refused() -> None:
    _check_device(1, 2)
    with pytest.raises(ConfigError, match=r"^--nproc-per-node .* process 3 finds 2"):
        _check_device(2, 2)


def test_the_platform_is_chosen_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", "cpu")
    assert (platform.device_type(), platform.has_accelerator(), platform.device_count()) == ("cpu", False, 1)
    assert platform.local_device() == torch.device("cpu")
    assert platform.distributed_backend() == "gloo"
    assert device_rng_state() is None


@pytest.mark.parametrize("asked", ["xpu", "gpu"])
def test_an_unavailable_platform_is_one_line(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", asked)
    with pytest.raises(
        ConfigError, match=rf"^FSDPTRAIN_PLATFORM={asked}: torch finds no such device .*; use .*cpu, or unset it"
    ):
        platform.device_type()


@pytest.mark.gpu
def test_a_device_may_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = platform.device_type()
    assert kind != "cpu"
    state = device_rng_state()
    assert state is not None
    first = torch.rand(4, device=kind)
    set_device_rng_state(state)
    assert torch.equal(torch.rand(4, device=kind), first)
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", "cpu")
    assert (platform.device_type(), platform.distributed_backend()) == ("cpu", "gloo")


@pytest.mark.gpu
def test_a_group_of_one_process_is_on_the_device() -> None:
    with platform.process_group(60):
        assert platform.device_count() >= 1
        value = torch.ones(2, device=platform.local_device())
        dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
        assert dist.get_default_backend_for_device(value.device) in dist.get_backend_config()


GOOD = rank_variables(1, 2, 29500)


def test_variables_are_read():
    assert read_rank_variables({}) is None
    ranks = read_rank_variables(GOOD)
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_world_size) == (1, 2, 2)
    assert (ranks.master_addr, ranks.master_port, ranks.store_of_agent) == ("127.0.0.1", 29500, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"RANK": "abc"}, "RANK=abc in the environment is not an integer"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=None in the environment is not an integer"),
        ({"RANK": "2"}, "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR do not fit together"),
        ({"MASTER_ADDR": ""}, "RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR do not fit together"),
    ],
)
def test_invalid_variables_are_one_line(changes, line):
    with pytest.raises(ConfigError) as caught:
        read_rank_variables(GOOD | changes)
    assert str(caught.value).startswith(line)
    assert "torchrun" in str(caught.value)
