"""Names resolve to objects of a table, a module or a plug-in. Errors are one line."""

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError
from fsdptrain.registry import plugin_names, resolve
from tests.packages import install

TABLE = {"one": 1, "two": 2}
LOGGER = {"acme_logger": "class AcmeLogger: ...\n", "acme_exit": "raise SystemExit(0)\n", "acme_bug": "1 / 0\n"}


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    points = [
        "loggers.acme = acme_logger:AcmeLogger",
        "engines.acme = no_such_module:Engine",
        "losses.exit = acme_exit:loss",
    ]
    monkeypatch.syspath_prepend(install(tmp_path / "acme", "acme", "fsdptrain.plugins", points, LOGGER))


def test_plugins_are_found_by_kind_and_loaded_on_use():
    assert [plugin_names(kind) for kind in ("loggers", "engines", "backends")] == [["acme"], ["acme"], []]
    assert resolve("acme", {}, flag="--x", plugins="loggers").__name__ == "AcmeLogger"
    assert Config(hf_checkpoint="x", log_to=["acme"], log_project="p").log.to == ["acme"]


def test_names_are_of_the_table_or_of_a_module():
    assert resolve("two", TABLE, flag="--x") == 2
    assert resolve("math:pi", TABLE, flag="--x") == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "plugins", "line"),
    [
        ("ones", None, r"--x does not know 'ones'; did you mean 'one'\?; it takes one, two or package"),
        ("math:pie", None, r"--x math:pie: .*no attribute 'pie'"),
        ("acme", "engines", r"^plug-in engines.acme = no_such_module:Engine cannot be loaded: No module"),
        ("exit", "losses", r"^plug-in losses.exit = acme_exit:loss cannot be loaded: SystemExit: 0 \(acme_exit.py:1\)"),
        ("acme_exit:reward", None, r"^--x acme_exit:reward cannot be imported: SystemExit: 0 \(acme_exit.py:1\)$"),
        ("acme_bug:reward", None, r"^--x acme_bug:reward cannot be imported: ZeroDivisionError: .*\(acme_bug.py:1\)$"),
    ],
)
def test_a_name_that_does_not_resolve_is_one_line(name, plugins, line):
    with pytest.raises(ConfigError, match=line):
        resolve(name, TABLE, flag="--x", plugins=plugins)


def test_a_function_that_does_not_fit_its_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--x os:getcwd takes \(\), which does not fit its calls"):
        resolve("os:getcwd", {}, flag="--x", call=lambda f: f("prompt", "text"))
    with pytest.raises(ConfigError, match="--x asyncio:wait_for is async, and nothing awaits"):
        resolve("asyncio:wait_for", {}, flag="--x", call=lambda f: f("prompt", "text"))
    with pytest.raises(ConfigError, match="--x os:sep is not a function"):
        resolve("os:sep", {}, flag="--x", call=lambda f: f("prompt", "text"))
