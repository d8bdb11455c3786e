"""Memory within the limits of control groups, and the device of a process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptrain import platform
from fsdptrain.cores import cgroup_files
from fsdptrain.errors import ConfigError
from fsdptrain.platform import _check_device, _group_memory, host_memory

MIB = 1024**2


def make_group(folder: Path, limit: str, used: int, file_pages: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - file_pages}\ninactive_file {file_pages}\n")


def test_every_parent_control_group_is_a_limit(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    make_group(root / "job", str(100 * MIB), 60 * MIB, 20 * MIB)
    make_group(root / "job" / "step", "max", 50 * MIB, 20 * MIB)
    membership.write_text("4:memory:/v1\n0::/job/step\n")

    limits = cgroup_files("memory.max", membership, root)
    groups = [limit.parent for limit in limits]

    assert groups == [root / "job" / "step", root / "job"]
    assert _group_memory(groups[1]) == (100 * MIB, 60 * MIB)
    assert min(_group_memory(groups[0])) > 2**60
    assert cgroup_files("memory.max", tmp_path / "nowhere", root) == []


def test_host_memory_of_this_machine() -> None:
    free, total = host_memory()
    assert 0 <= free <= total


def test_more_processes_than_devices_are_refused() -> None:
    _check_device(1, 2)
    with pytest.raises(ConfigError, match=r"^--nproc-per-node .* process 3 finds 2"):
        _check_device(2, 2)


def test_the_platform_is_chosen_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", "cpu")
    assert (platform.device_type(), platform.has_accelerator(), platform.device_count()) == ("cpu", False, 1)
    assert platform.local_device() == torch.device("cpu")
    assert platform.distributed_backend() == "gloo"
    assert platform.device_rng_state() is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [("xpu", "torch finds no such device on this machine"), ("gpu", "torch does not know this device type")],
)
def test_an_unavailable_platform_is_one_line(asked: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRAIN_PLATFORM", asked)
    with pytest.raises(ConfigError, match=rf"^FSDPTRAIN_PLATFORM={asked}: {why}; use .*cpu, or unset it"):
        platform.device_type()


@pytest.mark.gpu
def test_a_device_may_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = platform.device_type()
    assert kind != "cpu"
    state = platform.device_rng_state()
    assert state is not None
    first = torch.rand(4, device=kind)
    platform.set_device_rng_state(state)
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
