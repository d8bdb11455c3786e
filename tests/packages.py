"""An installed package with entry points, as pip leaves it: modules and a .dist-info folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def install(folder: Path, name: str, group: str, points: Sequence[str], modules: Mapping[str, str]) -> Path:
    """Write distribution `name` 1.0 into `folder`, which is to be put on sys.path."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{point}\n" for point in points))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder
