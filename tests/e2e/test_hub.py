"""--push-to-hub against a server on this machine that speaks the part of the hub's API that an upload takes."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from fsdptrain import Config, Trainer, platform
from fsdptrain.errors import ConfigError
from fsdptrain.trainer.hub import open_repository, push

NAME, TOKEN = "somebody/tiny", "hf_of_the_tests"


@dataclass
class Hub:
    """One user, who may write into repositories of `somebody`."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: bool = False  # to take uploads
    reads_only: bool = False  # the token may not write

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.private:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return 200, {"url": f"{self.url}/{name}"}
        if path == f"/api/models/{NAME}" and method == "GET":
            return 200, {"id": NAME, "private": self.private[NAME], "sha": "0" * 40, "siblings": []}
        if path == f"/api/models/{NAME}/auth-check/write":
            return (403, {"error": "read-only token"}) if self.reads_only else (200, {})
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == f"/api/models/{NAME}/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return (403, {"error": "full"}) if self.refuses else (200, {"files": files})
        if path == f"/api/models/{NAME}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"{self.url}/{NAME}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
        return 404, {"error": f"{method} {path}"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            status, content = found.answer(self.command, path, body, self.headers.get("authorization", ""))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank and speaks to `hub`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with platform.process_group(60):
        yield


@pytest.mark.usefixtures("alone")
def test_a_run_ends_in_a_private_repository_with_a_model_card(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    options = {"hf_checkpoint": str(checkpoint), "output_dir": str(tmp_path), "push_to_hub": NAME, "num_rollout": 1}
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 4, "eval_interval": 0}
    rows = [{"prompt": "say a", "label": "a"}] * 2
    run = Trainer(Config(**options, **sizes, reward="exact", bf16=False, log_to=[]), dataset=rows)
    hub.refuses = True
    with pytest.raises(ConfigError, match="hf upload"):
        run.fit()
    hub.refuses = False
    run.fit()  # again, over what the failed upload has left
    assert hub.private == {NAME: True}
    for path in (tmp_path / "hf").iterdir():
        assert hub.files[path.name] == path.read_bytes()
    assert set(hub.files) == {path.name for path in (tmp_path / "hf").iterdir()}
    for text in (str(checkpoint.parent), str(tmp_path), "grpo"):  # no option of the run
        assert text.encode() not in hub.files["README.md"]


@pytest.mark.usefixtures("alone")
def test_a_missing_login_ends_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"--push-to-hub somebody/tiny: .*hf auth login"):
        open_repository(Config(hf_checkpoint="x", push_to_hub=NAME))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", None])
def test_a_hub_out_of_reach_and_a_broken_name_are_one_line(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if url is not None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
    with pytest.raises(ConfigError) as caught:
        open_repository(Config(hf_checkpoint="x", push_to_hub="a/b/c" if url is None else NAME))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_a_token_that_may_not_write_ends_the_run_before_it_begins(hub: Hub) -> None:
    hub.private[NAME], hub.reads_only = True, True
    with pytest.raises(ConfigError, match="a token that may write"):
        open_repository(Config(hf_checkpoint="x", push_to_hub=NAME))


@pytest.mark.usefixtures("alone")
def test_a_public_repository_is_refused(hub: Hub) -> None:
    hub.private[NAME] = False
    with pytest.raises(ConfigError, match="is a public repository"):
        open_repository(Config(hf_checkpoint="x", push_to_hub=NAME))


@pytest.mark.usefixtures("alone")
def test_a_failed_upload_says_how_to_repeat_it(hub: Hub, tmp_path: Path) -> None:
    hub.private[NAME], hub.refuses = True, True
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"hf upload {NAME} {tmp_path / 'hf'}"):
        push(NAME, tmp_path / "hf")
