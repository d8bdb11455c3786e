"""A whole run from the command line with a server in another environment, and what remains after a kill."""

import json
import re
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from fsdptrain.vllm.weight_file import SHARED_MEMORY, folder_name
from tests.e2e import command
from tests.matrix import only
from tests.testing import save_tiny_checkpoint, wait_until
from tests.vllm.servers.conftest import ONE_SERVER, PYTHON


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


DEATHS = [([], ["run"]), ([], ["server", "run"]), (["--nproc-per-node", "2"], ["server", "run"])]


@pytest.mark.parametrize(("ranks", "deaths"), only(DEATHS[:1], DEATHS))
def test_a_run_ends_with_its_server_a_resume_goes_on_and_its_server_ends_with_it(tmp_path, ranks, deaths):
    """The trainer agrees with the logprobs of each server."""
    model, folder, log = save_tiny_checkpoint(tmp_path / "model", head_dim=32), tmp_path / "run", tmp_path / "log"
    argv = ["--hf-checkpoint", str(model), *command.UNEVALUATED, *ONE_SERVER, "--rollout-server-python", str(PYTHON)]
    argv += [*ranks, "--num-rollout", "1000", "--save-interval", "1", "--output-dir", str(folder)]
    for death in deaths:
        done = len(command.trained(rows(folder)))
        run = command.start(argv, log)
        try:
            wait_until(lambda done=done: len(command.trained(rows(folder))) > done + 2, 400, alive=run.is_alive)
            everyone, servers = psutil.Process(run.pid).children(recursive=True), servers_of(run)
            assert servers
            for process in servers if death == "server" else []:
                process.kill()
            run.join(200 if death == "server" else 0)
        finally:
            run.kill()
            run.join()
        _, alive = psutil.wait_procs(everyone, timeout=20)
        assert alive == []
        if death == "server":
            assert run.exitcode > 0, "it ended by itself, with an error"
            [line] = [line for line in (log / "err").read_text().splitlines() if "http://127.0.0.1:" in line]
            assert "ended the connection" in line
            assert "server0.log" in line
    steps = [row["step"] for row in command.trained(rows(folder))]
    assert steps == sorted(set(steps)) == [*range(steps[0], steps[-1] + 1)]
    assert max(row["mismatch/abs_max"] for row in command.trained(rows(folder))) < 1e-4
    assert not (SHARED_MEMORY / folder_name(folder)).exists()


def servers_of(run: ForkServerProcess) -> list[psutil.Process]:
    """The processes of vLLM: the one that listens, its engine and its worker."""
    everyone = psutil.Process(run.pid).children(recursive=True)
    lines = {process: " ".join(process.cmdline()) for process in everyone}
    names = re.compile("(?!.*supervisor[.]py).*(vllm[.]entrypoints|VLLM)")
    return [process for process, line in lines.items() if names.match(line)]


NO_START = [("/nowhere/python", "No such file"), (PYTHON, "unrecognized arguments: --no-such-option")]


@pytest.mark.parametrize(("python", "why"), only(NO_START[:1], NO_START))
def test_a_server_that_cannot_start_is_one_line_on_the_command_line(tmp_path, python, why):
    model = save_tiny_checkpoint(tmp_path / "model", head_dim=32)
    argv = ["--hf-checkpoint", str(model), *command.TINY_RUN, *ONE_SERVER, "--rollout-server-python", str(python)]
    argv += ["--rollout-engine-args", "no_such_option=1", "--output-dir", str(tmp_path / "run")]
    result = command.run(argv, tmp_path / "log", timeout=300)
    assert result.code == 2, result.err
    [line] = [line for line in result.err.splitlines() if "server0.log" in line]
    assert "ended during its start" in line
    assert why in line
