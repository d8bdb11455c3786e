"""What the page of a run gets: new rows only, bounded, from files that grow and are replaced; who may get it."""

import base64
import hashlib
import http.client
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from fsdptrain.config import Config, to_yaml
from fsdptrain.loggers import RunInfo
from fsdptrain.loggers.jsonl import JsonlLogger
from fsdptrain.tools.watch.page import render
from fsdptrain.tools.watch.run_data import RunData, Tail
from fsdptrain.tools.watch.server import WatchServer


def log_steps(folder, steps, *, resumed_step=None, value=0.0):
    logger = JsonlLogger(RunInfo(folder, "p", "n", 10, resumed_step))
    for step in steps:
        logger.log({"reward/mean": value + step}, step)
        logger.log_samples([{"set": "train", "response": f"{value} of {step}", "error": "secret"}], step)
    logger.close()


def payload(run, seen=""):
    run.poll()
    return run.payload(seen)


def responses(found):
    return [sample["response"] for sample in found["samples"]]


def test_a_tail_reads_each_whole_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == (False, [])
    with path.open("ab") as file:
        for i, cut in ((1, 3), (2, 11), (3, 5)):
            line = json.dumps({"step": i, "text": "é"}, ensure_ascii=False).encode() + b"\n"
            file.write(line[:cut])
            file.flush()
            assert tail.read() == (False, [])
            file.write(line[cut:])
            file.flush()
            assert tail.read() == (False, [{"step": i, "text": "é"}])
    path.write_bytes(path.read_bytes() + b'\0\n[]\n{"x": 1}\n{"step": "4"}\n{"step": 5}\n')
    assert tail.read() == (False, [{"step": 5}])


def test_a_page_gets_what_is_new(tmp_path):
    run = RunData(tmp_path, "a")
    first = payload(run)
    assert (first["step"], first["samples"]) == (None, [])
    log_steps(tmp_path, [1, 2])
    second = payload(run, first["cursor"])
    assert second["curves"]["reward/mean"] == {"x": [1, 2], "y": [1, 2]}
    assert responses(second) == ["0.0 of 1", "0.0 of 2"]
    assert "secret" not in json.dumps(second)
    assert payload(run, second["cursor"]) == {"cursor": second["cursor"]}
    log_steps(tmp_path, [3], resumed_step=2)
    third = payload(run, second["cursor"])
    assert third["step"] == 3


def test_a_resumed_run_replaces_what_the_page_has(tmp_path):
    run = RunData(tmp_path, "a")
    log_steps(tmp_path, [1, 2, 3, 4])
    first = payload(run)
    log_steps(tmp_path, [3], resumed_step=2, value=10.0)
    second = payload(run, first["cursor"])
    assert second["curves"]["reward/mean"] == {"x": [1, 2, 3], "y": [1, 2, 13]}
    assert not second["keeps_samples"]
    assert responses(second) == ["0.0 of 1", "0.0 of 2", "10.0 of 3"]


def test_the_pace_is_that_since_the_start_or_resume(tmp_path):
    times = [100, 110, 120, 1000, 1030]  # resumed at 900
    rows = (json.dumps({"step": step, "time": time}) for step, time in enumerate(times))
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "config.yaml").write_text(to_yaml(Config(hf_checkpoint="x", prompt_data="y")))
    for start, pace in ((90, 232.5), (900, 30), (2000, None)):
        os.utime(tmp_path / "config.yaml", (start, start))
        assert payload(RunData(tmp_path, "a"))["pace"] == pace


def test_the_page_allows_its_own_script_and_style_only():
    page = render({"runs": [], "saved": 1.0, "x": "</script><!--<script>"})
    script = page.html.rpartition("<script>")[2].partition("</script>")[0]
    style = page.html.partition("<style>")[2].partition("</style>")[0]
    for text in (script, style):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page.policy
    assert page.policy in page.html
    assert "innerHTML" not in script
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    data = page.html.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["x"] == "</script><!--<script>"
    assert page.html.count("<!--") == 0


@contextmanager
def serving(folder) -> Iterator[WatchServer]:
    with WatchServer([RunData(folder, "a")]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, *, method="GET", host=None, key=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    headers = {"Host": host or f"127.0.0.1:{server.server_port}"}
    headers |= {"Authorization": f"Bearer {key}"} if key is not None else {}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_only_the_key_and_a_name_of_this_machine_open_the_page(tmp_path):
    log_steps(tmp_path, [1])
    (tmp_path / "secret").write_text("secret")
    with serving(tmp_path) as server:
        page, key = urlsplit(server.url), server.key
        path = f"/?{page.query}"
        assert page.hostname == "127.0.0.1"
        status, body, headers = ask(server, path)
        assert (status, b"fsdptrain" in body) == (200, True)
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, body, _ = ask(server, "/data?seen=", key=key)
        assert status == 200
        assert json.loads(body)["runs"][0]["step"] == 1
        for host in ("localhost:9000", "localhost", "127.0.0.1"):  # a tunnel has a port of its own
            assert ask(server, path, host=host)[0] == 200
        for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", "0.0.0.0", "[::1]:1"):
            assert ask(server, path, host=host)[0] == 403
            assert ask(server, "/data", host=host, key=key)[0] == 403
        for wrong in ("", "?key=", "?key=x", f"?key={key[:-1]}", "?key=%C3%A9"):
            assert ask(server, f"/{wrong}")[0] == 403
        assert [ask(server, "/data", key=wrong)[0] for wrong in (None, "", "x", key[:-1])] == [403] * 4
        assert ask(server, f"/data?key={key}")[0] == 403
        for other in ("/secret", "/../secret", "/metrics.jsonl", f"/{tmp_path}/secret", "/%2e%2e/secret"):
            status, body, _ = ask(server, f"{other}?{page.query}", key=key)
            assert (status, b"secret" in body) == (404, False)
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert ask(server, path, method=method, key=key)[0] == 501
