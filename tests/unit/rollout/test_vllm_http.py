"""A request over TLS ends when it must, as one without: an answer may take its time, and nobody waits who need not."""

import errno
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from fsdptrain.errors import RolloutError
from fsdptrain.vllm.server.client import ServerGoneError, ServerSilentError, VLLMClient
from tests.unit.rollout.scripted_server import ScriptedServer

GENERATE = "/inference/v1/generate"


@pytest.fixture(params=["http", "https"])
def server(request, tmp_path, monkeypatch) -> Iterator[ScriptedServer]:
    """With TLS 1.3, where a server sends something as soon as it is spoken to: tickets, and no answer."""
    server = ScriptedServer(listens=request.param == "http")
    if request.param == "https":
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
        subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command, "-days", "1", *subject], check=True, capture_output=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.client = VLLMClient(f"https://127.0.0.1:{server.server_address[1]}")
        server.listen()
    yield server
    server.shutdown()
    server.server_close()


def test_an_answer_may_take_longer_than_a_sign_of_life(server):
    server.delays[GENERATE] = 4.0
    assert server.client.generate({"token_ids": [4, 5]}, timeout=3.0)["choices"][0]["token_ids"] == [4, 5]


def test_all_else_may_not(server):
    server.delays["/is_paused"] = 60.0
    start = time.monotonic()
    with pytest.raises(ServerSilentError, match="did not answer GET /is_paused in 1 s"):
        server.client.get("/is_paused", timeout=0.7)
    assert time.monotonic() - start < 30


def test_who_is_given_up_is_not_waited_for(server):
    server.delays[GENERATE] = 60.0
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    start = time.monotonic()
    with pytest.raises(ServerGoneError, match=f"was given up during POST {GENERATE}"):
        server.client.until(stop.is_set).generate({"token_ids": [4]}, timeout=60)
    assert time.monotonic() - start < 30


def test_a_limit_of_this_process_is_not_blamed_on_a_server(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(RolloutError, match="ulimit -n"):
        VLLMClient("http://127.0.0.1:1").version(timeout=1)
