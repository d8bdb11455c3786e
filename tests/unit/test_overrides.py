"""A package replaces a function by its qualified name, on its device. Errors of a package are one line."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fsdptrain
from fsdptrain import overrides
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.optimizers import has_fused_adamw
from fsdptrain.overrides import OVERRIDABLE, Overridable, install_overrides
from tests.packages import install

KEY = "fsdptrain.fsdp.optimizers.has_fused_adamw"
Plugin = Callable[..., None]

SOURCE = """
def no_kernel(device_type):
    return False

def other_arguments(device):
    return False

not_callable = 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution as pip leaves it; afterwards the originals are back."""

    def make(*points: str, name: str = "acme") -> None:
        monkeypatch.syspath_prepend(
            install(tmp_path / name, name, overrides.GROUP, points, {f"{name}_kernels": SOURCE})
        )

    yield make
    monkeypatch.undo()
    install_overrides("cpu")


def test_the_named_function_is_replaced_on_its_device_only(plugin: Plugin):
    plugin(f"cpu.{KEY} = acme_kernels:no_kernel", "npu.fsdptrain.platform.device_memory = not_there:memory")
    assert has_fused_adamw("cpu")  # not before it is asked for
    (override,) = install_overrides("cpu")
    assert not has_fused_adamw("cpu")
    assert override.line == f"{KEY}: acme_kernels:no_kernel of acme 1.0"
    assert install_overrides("cuda") == []
    assert has_fused_adamw("cpu")


@pytest.mark.parametrize(
    ("point", "why"),
    [
        (f"cpu.{KEY} = not_there:f", r"cannot be loaded: ModuleNotFoundError: .*; fix or uninstall it"),
        (f"cpu.{KEY} = acme_kernels:absent", "cannot be loaded: AttributeError"),
        (f"cpu.{KEY} = acme_kernels:not_callable", "cannot be loaded: TypeError"),
        (f"cpu.{KEY} = acme_kernels:other_arguments", r"takes \(device\), but fsdptrain.* takes \(device_type\)"),
        (
            "cpu.optim.has_fused_adamw = acme_kernels:no_kernel",
            "optim.has_fused_adamw cannot be overridden; .* key of fsdptrain",
        ),
        ("npu.fsdptrain.cli.run = acme_kernels:no_kernel", "fsdptrain.cli.run cannot be overridden"),
    ],
)
def test_a_broken_plugin_is_an_error(plugin: Plugin, point: str, why: str):
    plugin(point)
    with pytest.raises(ConfigError, match=f"^plug-in {point.split(' ')[0]} = .* of acme 1.0:? {why}"):
        install_overrides("cpu")


def test_two_plugins_for_one_function_are_an_error(plugin: Plugin):
    plugin(f"cpu.{KEY} = acme_kernels:no_kernel")
    plugin(f"cpu.{KEY} = bolt_kernels:no_kernel", name="bolt")
    with pytest.raises(ConfigError, match=rf"^two plug-ins for cpu\.{KEY}: .* of acme 1.0 and .* of bolt 1.0; remove"):
        install_overrides("cpu")


def test_the_table_names_exactly_what_is_declared():
    found = set()
    for module in pkgutil.walk_packages(fsdptrain.__path__, "fsdptrain."):
        if Path(module.module_finder.find_spec(module.name, None).origin).read_text().count("@overridable\n"):
            values = vars(importlib.import_module(module.name)).values()
            here = {value.__qualname__ for value in values if isinstance(value, Overridable)}
            found |= {f"{module.name}.{name}" for name in here}
    assert found == set(OVERRIDABLE)
    for key in OVERRIDABLE:
        function = overrides._function(key)
        assert isinstance(function, Overridable)
        assert f"{function.__module__}.{function.__qualname__}" == key
