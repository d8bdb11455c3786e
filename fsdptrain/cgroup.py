"""The cgroup v2 limits of this process (container, Slurm job)."""

from pathlib import Path

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cgroup_files(name: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> list[Path]:
    """Return the files `name` of the cgroups that apply to this process, innermost first."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    own = [root / line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    groups = [folder for path in own for folder in (path, *path.parents) if folder.is_relative_to(root)]
    return [group / name for group in groups if (group / name).is_file()]
