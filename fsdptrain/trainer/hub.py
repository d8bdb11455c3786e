"""--push-to-hub: the exported model, in a repository of the Hugging Face Hub. No option of the run is uploaded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch.distributed as dist
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from fsdptrain.config import Config
from fsdptrain.distributed import one_line, raise_on_all_ranks
from fsdptrain.errors import ConfigError
from fsdptrain.fsdp.export_folder import MODEL_FILES

log = logging.getLogger(__name__)

_CARD = "---\ntags: [fsdptrain]\n---\n# {}\nTrained with fsdptrain.\n"


def open_repository(config: Config) -> None:
    """Create the repository, so that a missing login ends the run before it begins. Collective.

    Raises ConfigError on all ranks, also for a public repository.
    """
    name = config.run.push_to_hub
    with raise_on_all_ranks(ConfigError, "--push-to-hub"):
        if dist.get_rank() == 0:
            assert name is not None
            with _named_errors(name, "log in by `hf auth login`, with a token that may write"):
                api = HfApi()
                api.create_repo(name, private=True, exist_ok=True)
                api.auth_check(name, write=True)
                if not api.model_info(name).private:
                    raise ConfigError(
                        f"--push-to-hub {name} is a public repository: choose another, or make it private"
                    )


def push(name: str, export: Path) -> None:
    """Upload the folder `export`. For rank 0, after the last collective: other ranks must not wait for an upload."""
    card = export / "README.md"
    if not card.exists():  # else the user's, or of an earlier upload
        card.write_text(_CARD.format(name.rpartition("/")[2]))
    with _named_errors(name, f"the run is complete; upload it by `hf upload {name} {export}`"):
        done = HfApi().upload_folder(repo_id=name, folder_path=export, delete_patterns=MODEL_FILES)
        log.info("uploaded to %s", done)


@contextmanager
def _named_errors(name: str, fix: str) -> Iterator[None]:
    """Turn an error of the hub into one line."""
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {name}: {one_line(error)}") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(f"--push-to-hub {name}: {one_line(error)}; {fix}") from error
