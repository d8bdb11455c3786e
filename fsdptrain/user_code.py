"""Import code that is not of this package: an attribute by its path, or a plug-in."""

import importlib
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from fsdptrain.errors import ConfigError, describe


def import_attribute(path: str, *, flag: str) -> Any:
    """Import `package.module:attribute` or `folder/file.py:attribute`.

    The current directory and the file's folder are on the import path; the module has the file's name.
    """
    name, _, attribute = path.rpartition(":")
    file = Path(name).resolve() if name.endswith(".py") else None
    folder = str(file.parent) if file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # console scripts do not add the current directory; `python -m` does
    try:
        if file and not file.exists():
            raise FileNotFoundError("there is no such file")
        module = importlib.import_module(file.stem if file else name)
        if file and not (module.__file__ and file.samefile(module.__file__)):
            raise ImportError(f"another module is named {file.stem}: rename the file")
        return getattr(module, attribute)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ConfigError(
            f"{flag} {path}: {error}; use package.module:attribute, importable from here, or folder/file.py:attribute"
        ) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"{flag} {path} cannot be imported: {describe(error)}") from error


def load_plugin(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # user code may raise anything
        reason = error if isinstance(error, ImportError | AttributeError) else describe(error)
        raise ConfigError(
            f"plug-in {point.name} = {point.value} cannot be loaded: {reason}; fix or uninstall it"
        ) from error
