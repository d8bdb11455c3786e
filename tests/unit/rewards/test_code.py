"""Code of a response is tested under limits. It neither outlives its test nor passes tests that it has not run."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from fsdptrain.config import RewardConfig
from fsdptrain.errors import RewardError
from fsdptrain.rewards import code as rewards
from fsdptrain.rewards import sandbox
from fsdptrain.rewards.build import build_reward
from fsdptrain.rewards.code import code, extract_code, parse_tests
from fsdptrain.rewards.parallel import ParallelReward
from fsdptrain.types import Prompt

DOUBLE = "def double(x):\n    return 2 * x"
HAS_NAMESPACES = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x70000000) != 0)"


@pytest.fixture(scope="session")
def has_namespaces() -> bool:
    return subprocess.run([sys.executable, "-c", HAS_NAMESPACES], check=False).returncode == 0


@pytest.fixture(params=["namespaces", "refused"])
def isolated(request: pytest.FixtureRequest, has_namespaces: bool, replaced: Callable[[str, str], None]) -> bool:
    """Whether the sandbox has namespaces. Without, the kernel refuses them here, or refuses a wrong flag."""
    if request.param == "refused":
        replaced("| 0x40000000", "| 0x1")
    elif not has_namespaces:
        pytest.skip("the kernel refuses namespaces")
    return request.param == "namespaces"


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Replaces text of the sandbox."""
    script = tmp_path / "sandbox.py"
    script.write_text(Path(sandbox.__file__).read_text())

    def replace(before: str, after: str) -> None:
        assert before in script.read_text()
        script.write_text(script.read_text().replace(before, after))
        monkeypatch.setattr(sandbox, "__file__", str(script))

    rewards._warn.cache_clear()
    yield replace
    rewards._warn.cache_clear()


def scored(program: str, label: object) -> tuple[float, float]:
    found = code(Prompt("p", [1], "", label=label), f"Here it is.\n```python\n{program}\n```\n")
    assert found is not None
    return found["reward"], found["passed"]


def running(mark: str) -> list[int]:
    """Return the processes with `mark` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_reward_is_1_only_if_all_tests_pass(isolated: bool) -> None:
    assert scored(DOUBLE, "assert double(2) == 4\nassert double(0) == 0") == (1, 1)
    assert scored(DOUBLE, "assert double(2) == 5") == (0, 0)
    assert scored(DOUBLE, ["assert double(2) == 4", "assert double(2) == 5"]) == (0, 0.5)
    assert scored("def double(x) return", ["assert True"]) == (0, 0)


def test_a_program_reads_its_input_and_prints_the_expected_output() -> None:
    program = "import sys\nif __name__ == '__main__':\n    print(2 * int(input()), end='  \\n\\n')\n"
    pairs = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "7"}]
    columns = {"inputs": ["2\n", "3"], "outputs": ["4\n", "7"]}
    for label in (pairs, columns, json.dumps(pairs), json.dumps(columns)):
        assert parse_tests(label) == parse_tests(pairs)
    assert scored(program, pairs) == (0, 0.5)
    assert scored(program + "sys.exit(0)", pairs[:1]) == (1, 1)
    assert scored(program + "sys.exit(1)", pairs[:1]) == (0, 0)


def test_code_is_the_last_block_of_python() -> None:
    text = "```python\na\n```\nprints\n```text\nb\n```\n```\nc\n```\n"
    assert extract_code(text) == "a\n"
    assert extract_code(text + "```Python\nd\n```") == "d\n"
    assert extract_code("```text\nb\n```\n```\nc\n```\n```python\nnever closed") == "c\n"
    assert extract_code("<answer>e</answer>") == "e"
    assert extract_code("no code") == ""
    assert code(Prompt("p", [1], "", label=["assert True"]), "no code") == {"reward": 0.0, "passed": 0.0}
    assert code(Prompt("p", [1], "", label=None), "no code") is None


@pytest.mark.parametrize(
    "label", [4, [], {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": "2"}], [None]]
)
def test_other_labels_leave_the_sample_unscored(label: object) -> None:
    with pytest.raises(RewardError, match="the label must be Python code with asserts"):
        scored(DOUBLE, label)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(600)"])
def test_a_program_that_does_not_end_fails_and_later_tests_too(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    assert scored("", "") == (1, 1)
    limit = max(0.5, 5 * (time.monotonic() - start))
    monkeypatch.setattr(rewards, "TEST_S", limit)
    monkeypatch.setattr(rewards, "ALL_TESTS_S", limit)
    assert scored(program, ["assert True"] * 1000) == (0, 0)


def test_processes_are_limited(isolated: bool, replaced: Callable[[str, str], None]) -> None:
    """Not those of root outside of a namespace."""
    replaced("NUM_PROCESSES_OF_USER = 4096", f"NUM_PROCESSES_OF_USER = {sandbox.NUM_PROCESSES}")
    bomb = """
import os, time
num = 0
try:
    while num < 200:
        if not os.fork():
            time.sleep(600)
        num += 1
except BlockingIOError:
    pass
"""
    assert scored(bomb, f"assert num < {sandbox.NUM_PROCESSES}, num") == (1, 1)


def test_memory_files_and_output_are_limited(isolated: bool) -> None:
    program = """
def fails(function, error):
    try:
        function()
    except error:
        return True

def write(file):
    for _ in range(100):
        file.write("x" * 2**20)
        file.flush()
"""
    memory = f"assert fails(lambda: bytearray({2 * sandbox.MEMORY_BYTES}), MemoryError)"
    output = "import sys\nassert fails(lambda: write(sys.stdout), OSError)"
    file = "assert fails(lambda: write(open('x', 'w')), OSError)"
    many = f"assert fails(lambda: [open('/dev/null') for _ in range({sandbox.NUM_FILES})], OSError)"
    assert scored(program, [memory, output, file, many]) == (1, 1)


def test_the_network_is_out_of_reach_or_a_warning_says_that_it_is_not(
    isolated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.WARNING):
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]})).close()"
        assert scored(connect, ["assert True"] * 2) == ((0, 0) if isolated else (1, 1))
    warnings = [text for text in caplog.messages if "with access to the network" in text]
    assert len(warnings) == (0 if isolated else 1)


def test_the_environment_of_the_trainer_is_out_of_reach(has_namespaces: bool) -> None:
    program = f"import os\ndef read():\n    return open('/proc/{os.getpid()}/environ', 'rb').read()"
    known = "{'OMP_NUM_THREADS', 'LD_LIBRARY_PATH', 'LC_CTYPE'}"
    assert scored(program, f"assert set(os.environ) <= {known}, os.environ") == (1, 1)
    if has_namespaces:
        assert scored(program, "try:\n    read()\nexcept PermissionError:\n    pass\nelse:\n    assert False") == (1, 1)


def test_a_program_dies_with_the_process_that_tests_it(isolated: bool) -> None:
    """A reward that misses --reward-timeout is killed."""
    mark = uuid4().hex
    child = "[sys.executable, '-c', 'import time; time.sleep(600) # MARK']"
    program = f"import subprocess, sys\nsubprocess.run({child})".replace("MARK", mark)
    test = "import sys\nfrom fsdptrain.rewards import code, sandbox\nsandbox.__file__ = sys.argv[1]\n"
    test += "code.passes(sys.stdin.read(), code.Test(''), 600.0)"
    tester = subprocess.Popen([sys.executable, "-c", test, sandbox.__file__], stdin=subprocess.PIPE, text=True)
    assert tester.stdin is not None
    tester.stdin.write(program)
    tester.stdin.close()
    try:
        wait_until(lambda: bool(running(mark)))
    finally:
        tester.send_signal(signal.SIGKILL)
        tester.wait()
    if isolated:
        wait_until(lambda: not running(mark))
    for process in running(mark):
        os.kill(process, signal.SIGKILL)


def test_the_reward_runs_in_processes_by_its_name() -> None:
    weighted = build_reward(RewardConfig(reward=["code"]), prompt_data="x")
    reward = ParallelReward(weighted, num_workers=1, timeout=60.0, patience=180.0)
    [right, bad] = reward.run(
        [
            (Prompt("a", [1], "", label=["assert double(1) == 2"] * 2), f"```python\n{DOUBLE}\n```"),
            (Prompt("b", [1], "", label=4), f"```python\n{DOUBLE}\n```"),
        ]
    )
    reward.close()
    assert not isinstance(right, str)
    assert (right.reward, right.rewards) == (1.0, {"code": 1.0, "passed": 1.0})
    assert isinstance(bad, str)
    assert "the label must be Python code" in bad
