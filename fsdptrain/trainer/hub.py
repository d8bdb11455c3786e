"""--push-to-hub: the exported model with a model card, in a repository of the Hugging Face Hub."""

import importlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch.distributed as dist
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

import fsdptrain
from fsdptrain.config import Config, to_yaml
from fsdptrain.distributed import one_line, raise_on_all_ranks
from fsdptrain.errors import ConfigError, FsdptrainError
from fsdptrain.trainer.run_dir import CONFIG_FILE, EXPORT

log = logging.getLogger(__name__)

_CURVES = "curves.png"


def open_repository(config: Config) -> None:
    """Create the repository of --push-to-hub, so that a missing login ends the run before it begins. Collective.

    Raises ConfigError on all ranks, also for a public repository with --hub-private.
    """
    name, private = config.run.push_to_hub, config.run.hub_private
    with raise_on_all_ranks(ConfigError, "--push-to-hub"):
        if dist.get_rank() == 0:
            assert name is not None
            with _named_errors(name, "log in by `hf auth login`, with a token that may write"):
                api = HfApi()
                api.create_repo(name, private=private, exist_ok=True)
                if private and not api.model_info(name).private:
                    raise ConfigError(
                        f"--push-to-hub {name} is a public repository: choose another, or allow it by --no-hub-private"
                    )


def push(config: Config, folder: Path) -> None:
    """Upload the export of the run in `folder`, with a model card, its recipe and its curves. Collective."""
    name = config.run.push_to_hub
    with raise_on_all_ranks(FsdptrainError, "--push-to-hub"):
        if dist.get_rank() == 0:
            assert name is not None
            _write_card(config, folder)
            with _named_errors(name, f"the run is complete; upload it by `hf upload {name} {folder / EXPORT}`"):
                url = HfApi().upload_folder(
                    repo_id=name, folder_path=folder / EXPORT, commit_message=f"fsdptrain {fsdptrain.__version__}"
                )
            log.info("uploaded to %s", url)


@contextmanager
def _named_errors(name: str, fix: str) -> Iterator[None]:
    """Turn an error of the hub into one line."""
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {name}: {one_line(error)}") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(f"--push-to-hub {name}: {one_line(error)}; {fix}") from error


def _write_card(config: Config, folder: Path) -> None:
    """Write README.md, the recipe and the curves into the export."""
    target = folder / EXPORT
    shutil.copyfile(folder / CONFIG_FILE, target / "recipe.yaml")
    has_curves = importlib.util.find_spec("matplotlib") is not None and _draw(folder, target / _CURVES)
    (target / "README.md").write_text(model_card(config, folder, with_curves=has_curves), encoding="utf-8")


def _draw(folder: Path, target: Path) -> bool:
    """Draw the curves of the run, if the tools are installed."""
    if importlib.util.find_spec("fsdptrain.tools") is None:
        return False
    importlib.import_module("fsdptrain.tools.report.curves").draw_curves(folder, target)
    return True


def model_card(config: Config, folder: Path, *, with_curves: bool) -> str:
    """Return the model card: what was trained from what, the last evaluation, the curves, the recipe."""
    name, model = config.run.push_to_hub, config.model.hf_checkpoint
    data = ", ".join(Path(source).name if Path(source).exists() else source for source in config.data.prompt_data)
    assert name is not None
    algorithm, short = config.algorithm.algorithm, name.rpartition("/")[2]
    accuracies = _last_accuracies(folder)
    is_adapter = (folder / EXPORT / "adapter_config.json").is_file()
    metadata = ModelCardData(
        base_model=None if Path(model).exists() else model,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["fsdptrain", algorithm],
        model_name=short,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="held-out",
                dataset_name=f"{data}, {held_out}",
                metric_type="accuracy",
                metric_value=value,
            )
            for held_out, value in accuracies.items()
        ],
    )
    parts = [f"---\n{metadata.to_yaml()}\n---\n", f"# {short}\n"]
    parts.append(
        f"{Path(model).name if Path(model).exists() else model}, trained with {algorithm} on {data} by "
        f"fsdptrain {fsdptrain.__version__}.\n"
    )
    if accuracies:
        rows = "".join(f"| {held_out} | {value:.3f} |\n" for held_out, value in accuracies.items())
        parts.append(f"## Evaluation\n\n| set | accuracy |\n|---|---|\n{rows}")
    if with_curves:
        parts.append(f"![Curves of the run]({_CURVES})\n")
    parts.append(f"## Recipe\n\n`fsdptrain --recipe recipe.yaml`, with all values:\n\n```yaml\n{to_yaml(config)}```\n")
    return "\n".join(parts)


def _last_accuracies(folder: Path) -> dict[str, float]:
    """Return the last accuracy of each held-out set by its name."""
    found: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith("eval/") and name.endswith("/accuracy"):
                found[name.split("/")[1]] = value
    return found
