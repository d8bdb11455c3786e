"""--push-to-hub: the exported model with a model card, in a repository of the Hugging Face Hub."""

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

import fsdptrain
from fsdptrain.config import Config, to_yaml
from fsdptrain.config.keys import all_keys
from fsdptrain.distributed import one_line, raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.run_dir import EXPORT

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
                api.auth_check(name, write=True)
                if private and not api.model_info(name).private:
                    raise ConfigError(
                        f"--push-to-hub {name} is a public repository: choose another, or allow it by --no-hub-private"
                    )


def push(config: Config, folder: Path) -> None:
    """Upload the export of the run in `folder`, with a model card, its recipe and its curves. Called by rank 0 alone.

    Call it after the last collective: other ranks must not wait for an upload.
    """
    name = config.run.push_to_hub
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
    (target / "recipe.yaml").write_text(to_yaml(_without_places(config)), encoding="utf-8")
    has_curves = importlib.util.find_spec("matplotlib") is not None and _draw(folder, target / _CURVES)
    (target / "README.md").write_text(model_card(config, folder, with_curves=has_curves), encoding="utf-8")


def _without_places(config: Config) -> Config:
    """Return a copy to publish: local paths without their folders, addresses of servers without host and user."""

    def public(value: Any) -> Any:
        if isinstance(value, list):
            return [public(item) for item in value]
        if not isinstance(value, str):
            return value
        if "://" in value:
            return f"{value.partition('://')[0]}://..."
        path, mark, options = value.partition("?")
        return Path(path).name + mark + options if os.sep in path and Path(path).exists() else value

    values = {flat: public(key.value(config)) for flat, key in all_keys().items()}
    return config.with_values(**{flat: value for flat, value in values.items() if value != config.value(flat)})


def _draw(folder: Path, target: Path) -> bool:
    """Draw the curves of the run, if the tools are installed."""
    if importlib.util.find_spec("fsdptrain.tools") is None:
        return False
    importlib.import_module("fsdptrain.tools.report.curves").draw_curves(folder, target)
    return True


def model_card(config: Config, folder: Path, *, with_curves: bool) -> str:
    """Return the model card: what was trained from what, the last evaluation, the curves, the recipe."""
    name, public = config.run.push_to_hub, _without_places(config)
    model, data = public.model.hf_checkpoint, ", ".join(public.data.prompt_data)
    assert name is not None
    algorithm, short = config.algorithm.algorithm, name.rpartition("/")[2]
    accuracies = {} if config.reward.reward == ["none"] else _last_accuracies(folder)
    is_adapter = (folder / EXPORT / "adapter_config.json").is_file()
    metadata = ModelCardData(
        base_model=None if Path(config.model.hf_checkpoint).exists() else model,
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
    parts.append(f"{model}, trained with {algorithm} on {data} by fsdptrain {fsdptrain.__version__}.\n")
    if accuracies:
        rows = "".join(f"| {held_out} | {value:.3f} |\n" for held_out, value in accuracies.items())
        parts.append(f"## Evaluation\n\n| set | accuracy |\n|---|---|\n{rows}")
    if with_curves:
        parts.append(f"![Curves of the run]({_CURVES})\n")
    recipe = to_yaml(public)
    parts.append(f"## Recipe\n\n`fsdptrain --recipe recipe.yaml`, with all values:\n\n```yaml\n{recipe}```\n")
    return "\n".join(parts)


def _last_accuracies(folder: Path) -> dict[str, float]:
    """Return the last accuracy of each held-out set by its name."""
    found: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith("eval/") and name.endswith("/accuracy"):
                found[name.split("/")[1]] = value
    return found
