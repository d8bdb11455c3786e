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
from fsdptrain.trainer.hub import open_repository
from tests.testing import tiny_run

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
        if path == f"/api/models/{NAME}/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return (403, {"error": "full"}) if self.refuses else (200, {"files": files})
        if path == f"/api/models/{NAME}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            return 200, {"commitUrl": f"{self.url}/{NAME}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
        listed = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
        other = {f"/api/models/{NAME}/tree/main": listed, "/api/validate-yaml": {"errors": [], "warnings": []}}
        return (200, other[path]) if path in other else (404, {"error": f"{method} {path}"})


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
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
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
    options = {"push_to_hub": NAME, "num_rollout": 1, "eval_interval": 0, "reward": "exact", "export": True}
    run = Trainer(tiny_run(checkpoint, tmp_path, **options), dataset=[{"prompt": "say a", "label": "a"}] * 2)
    hub.refuses = True
    with pytest.raises(ConfigError, match=f"hf upload {NAME} {tmp_path / 'hf'}"):
        run.fit()
    hub.refuses = False
    hub.files = {"model-00001-of-00002.safetensors": b"earlier", "adapter_config.json": b"", "NOTES.md": b""}
    run.fit()  # again, over what the failed upload has left
    assert hub.files.pop("NOTES.md") == b""  # the user's
    assert hub.private == {NAME: True}
    for path in (tmp_path / "hf").iterdir():
        assert hub.files[path.name] == path.read_bytes()
    assert set(hub.files) == {path.name for path in (tmp_path / "hf").iterdir()}
    for text in (str(checkpoint.parent), str(tmp_path), "grpo"):  # no option of the run
        assert text.encode() not in hub.files["README.md"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "url", "token", "state", "words"),
    [
        (NAME, None, "hf_wrong", {}, r"--push-to-hub somebody/tiny: .*hf auth login"),
        (NAME, "http://127.0.0.1:9", TOKEN, {}, "--push-to-hub"),
        ("a/b/c", None, TOKEN, {}, "--push-to-hub"),
        (NAME, None, TOKEN, {"private": {NAME: True}, "reads_only": True}, "a token that may write"),
        (NAME, None, TOKEN, {"private": {NAME: False}}, "is a public repository"),
    ],
)
def test_a_repository_that_cannot_be_written_or_is_public_is_refused_before_the_run_begins(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, url: str | None, token: str, state: dict, words: str
) -> None:
    vars(hub).update(state)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "ENDPOINT", url or hub.url)
    with pytest.raises(ConfigError, match=words) as caught:
        open_repository(Config(hf_checkpoint="x", push_to_hub=name))
    assert "\n" not in str(caught.value)
