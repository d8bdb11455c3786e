"""Names become objects; a plug-in is found by its entry point, and named when it is broken."""

import pytest

from fsdptrain.errors import ConfigError
from fsdptrain.registry import plugin_names, resolve


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a package with entry points, as pip would leave it."""

    def install(points):
        folder = tmp_path / "acme-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[fsdptrain.plugins]\n" + points)
        (tmp_path / "acme_logger.py").write_text("class AcmeLogger: ...\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_plugin_is_found_by_its_kind_and_loaded_only_when_asked_for(plugin):
    plugin("loggers.acme = acme_logger:AcmeLogger\nengines.acme = no_such_module:Engine\n")
    assert plugin_names("loggers") == ["acme"]
    assert plugin_names("engines") == ["acme"]
    assert plugin_names("backends") == []
    assert resolve("acme", {}, flag="--x", plugins="loggers").__name__ == "AcmeLogger"


def test_a_broken_plugin_is_one_line(plugin):
    plugin("engines.acme = no_such_module:Engine\n")
    with pytest.raises(ConfigError, match=r"^plug-in engines.acme = no_such_module:Engine cannot be loaded: No module"):
        resolve("acme", {}, flag="--x", plugins="engines")


def test_a_plugin_is_a_logger_that_log_to_takes(plugin):
    from fsdptrain.config import Config

    plugin("loggers.acme = acme_logger:AcmeLogger\n")
    assert Config(hf_checkpoint="x", log_to=["acme"], log_project="p").log.to == ["acme"]


def test_names_are_of_the_table_or_of_a_module():
    table = {"one": 1, "two": 2}
    assert resolve("two", table, flag="--x") == 2
    assert resolve("math:pi", table, flag="--x") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(
        ConfigError, match=r"--x does not know 'ones'; did you mean 'one'\?; it takes one, two or package"
    ):
        resolve("ones", table, flag="--x")
    with pytest.raises(ConfigError, match=r"--x math:pie: .*no attribute 'pie'"):
        resolve("math:pie", table, flag="--x")
