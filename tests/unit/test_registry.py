"""Names resolve to objects of a table, a module or a plug-in. Errors are one line."""

import pickle
import sys

import pytest

from fsdptrain.config import Config
from fsdptrain.errors import ConfigError, describe
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


def test_a_path_to_a_file_is_a_name(tmp_path, monkeypatch):
    for name in ("acme_rewards", "acme_logger"):
        (tmp_path / f"{name}.py").write_text("import json\n\ndef right(prompt, text):\n    return json.loads(text)\n")
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = f"{tmp_path.name}/acme_rewards.py:right"
    right = resolve(path, TABLE, flag="--x", call=lambda f: f("prompt", "text"))
    assert right(None, "4") == 4
    assert pickle.loads(pickle.dumps(right)) is right  # reward processes import it
    with pytest.raises(ValueError, match="Expecting value") as raised:
        right(None, "x")
    assert describe(raised.value).endswith("(acme_rewards.py:4)")  # the line of the user, not of json
    resolve("acme_logger:AcmeLogger", {}, flag="--x")
    for other, reason in [
        ("acme_logger", "another module is named acme_logger: rename"),
        ("acme_none", "there is no such file"),
    ]:
        with pytest.raises(ConfigError, match=f"{other}.py:right: {reason}.*; use package.*, or folder/file.py:attr"):
            resolve(f"{tmp_path}/{other}.py:right", {}, flag="--x")


@pytest.mark.parametrize(
    ("name", "plugins", "line"),
    [
        ("ones", None, r"--x: unknown name 'ones'; did you mean 'one'\? \(use one, two or package"),
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
    with pytest.raises(ConfigError, match=r"--x os:getcwd has the signature \(\), which does not match its calls"):
        resolve("os:getcwd", {}, flag="--x", call=lambda f: f("prompt", "text"))
    with pytest.raises(ConfigError, match="--x asyncio:wait_for is async, but its result is never awaited"):
        resolve("asyncio:wait_for", {}, flag="--x", call=lambda f: f("prompt", "text"))
    with pytest.raises(ConfigError, match="--x os:sep is not a function"):
        resolve("os:sep", {}, flag="--x", call=lambda f: f("prompt", "text"))
