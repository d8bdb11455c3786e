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
from types import ModuleType
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
from tests.testing import wait_until

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
        pytest.skip("the kernel denies namespaces")
    return request.param == "namespaces"


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Replaces text of the sandbox."""
    script = tmp_path / "sandbox.py"
    script.write_text(Path(sandbox.__file__).read_text())
    script.with_name("remote.py").write_text(Path(sandbox.__file__).with_name("remote.py").read_text())

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
    program = f"""
import sys

def fails(name, error):
    try:
        globals()[name]()
    except error:
        return True

def write(file):
    for _ in range(100):
        file.write("x" * 2**20)
        file.flush()

def memory(): bytearray({2 * sandbox.MEMORY_BYTES})
def output(): write(sys.stdout)
def file(): write(open('x', 'w'))
def many(): [open('/dev/null') for _ in range({sandbox.NUM_FILES})]
"""
    names = {"memory": "MemoryError", "output": "OSError", "file": "OSError", "many": "OSError"}
    asked = [f"assert fails('{name}', {error})" for name, error in names.items()]
    of_tests = [f"assert fails('append', NameError) is None\nbytearray({2 * sandbox.MEMORY_BYTES})"]
    assert scored(program, asked) == (1, 1)
    assert scored(program, of_tests) == (0, 0)


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
    program += "\ndef names():\n    return set(os.environ)"
    known = "{'OMP_NUM_THREADS', 'LD_LIBRARY_PATH', 'LC_CTYPE'}"
    assert scored(program, f"assert names() <= {known} and set(os.environ) <= {known}") == (1, 1)
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


CHEATS = {
    "rebind exec": "import builtins\nbuiltins.exec = lambda *a: None",
    "rebind compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__",
    "rebind AssertionError": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})",
    "rebind all and isinstance": "all = any = isinstance = lambda *a: True",
    "equal to everything": (
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\ndouble = lambda x: Equal()"
    ),
    "equal object": (
        "class Equal:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\ndouble = lambda x: Equal()"
    ),
    "frames": (
        "import sys, os\nframe = sys._getframe()\nwhile frame:\n    for value in frame.f_locals.values():\n"
        "        if isinstance(value, str) and len(value) == 32:\n"
        "            for fd in range(64):\n                try: os.pwrite(fd, value.encode(), 1)\n"
        "                except OSError: pass\n    frame = frame.f_back\nos._exit(0)"
    ),
    "garbage collector": (
        "import gc, os\nfor value in gc.get_objects():\n"
        "    if type(value) not in (dict, list, tuple): continue\n    try:\n"
        "        for text in value.values() if isinstance(value, dict) else value:\n"
        "            if isinstance(text, str) and len(text) == 32:\n"
        "                for fd in range(64):\n                    try: os.pwrite(fd, text.encode(), 1)\n"
        "                    except OSError: pass\n    except Exception: pass\nos._exit(0)"
    ),
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\nraise SystemExit(0)",
    "os._exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef double(x): os._exit(0)",
    "write all descriptors": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'0' * 64); os.pwrite(fd, b'0' * 64, 0)\n"
        "    except OSError: pass"
    ),
    "edit the file of the tests": (
        "import os, glob\nfor path in glob.glob('/proc/*/fd/*') + ['tests.py', 'solution.py']:\n"
        "    try: open(path, 'w').write('0' * 64)\n    except OSError: pass"
    ),
    "frame of a generator": (
        "def double(x): raise ValueError\ndef over(items):\n    return items.gi_frame.f_builtins['exec']('import os')"
    ),
    "globals of a function": "def double(x): return 0\ndef over(f): f.__globals__['double'] = lambda x: 2 * x",
}
TESTS = """
assert all(double(i) == 2 * i for i in range(3))
assert double(2) == 4 and double(2) in [4] and double(2) in {4} and not double(2) != 4
try:
    over(i for i in range(3))
    over(lambda: 0)
except Exception:
    pass
assert 4 == double(2) and isinstance(double(2), int) and 3 < double(2) < 5
"""


def test_no_program_reads_the_memory_of_its_tests(has_namespaces: bool) -> None:
    if not has_namespaces:
        pytest.skip("the kernel denies namespaces")
    mark = uuid4().hex
    program = """
import glob, os
def known():
    own = os.readlink("/proc/self")
    for folder in glob.glob("/proc/[0-9]*"):
        if folder.endswith("/" + own):
            continue
        try:
            lines = open(folder + "/maps").readlines()
            with open(folder + "/mem", "rb", 0) as memory:
                for line in lines:
                    start, end = (int(x, 16) for x in line.split()[0].split("-"))
                    memory.seek(start)
                    if MARK[::-1].encode() in memory.read(min(end - start, 2**26)):
                        return folder
        except (OSError, ValueError, OverflowError):
            continue
""".replace("MARK", repr(mark[::-1]))
    assert scored(program, f"assert known() is None  # {mark}") == (1, 1)


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_program_passes_tests_that_it_does_not_pass(cheat: str, isolated: bool) -> None:
    assert scored(CHEATS[cheat], [TESTS, "assert all(double(i) == 2 * i for i in range(3))"]) == (0, 0)


HONEST = """
import collections, decimal, fractions
from dataclasses import dataclass

class Empty(Exception):
    pass

class Stack:
    size = 0
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing", 0)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __lt__(self, other): return len(self) < len(other)
    def __str__(self): return f"Stack{self.items}"
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()

@dataclass
class Point:
    x: int
    y: int

counter = 0
def count():
    global counter
    counter += 1
def sum(a, b): return a + b
def double(x): return 2 * x
def values():
    return {"a": [1, (2, {3}), None, True], 4: 2**4000, "f": 0.1, "n": float("inf"), "b": b"x\\xff", "s": "\\ud800é"}
def kinds():
    return [collections.Counter("aab"), collections.deque([1]), decimal.Decimal("1.5"), fractions.Fraction(1, 3),
            frozenset({1}), range(3), 1 + 2j, collections.OrderedDict(a=1), collections.defaultdict(int, a=1)]
def turn(items): items.reverse(); items[0] = [9]
def fill(mapping): mapping["x"] = 1
def numbers():
    for i in range(3): yield i
def apply(function, *args): return function(*args)
def total(items): return [item for item in items]
def fails(x): raise ValueError(f"no {x}")
def named(thing): return thing.name + thing.shout("!")
"""
USES = [
    "assert double(3) == 6 and double([1]) == [1, 1] and double('a') == 'aa'",
    "def check(candidate):\\n    assert candidate(2) == 4\\n    assert candidate(0) == 0\\ncheck(double)",
    "from solution import double as d\\nimport solution\\nassert d(1) == solution.double(1) == 2",
    "assert sum(2, 3) == 5",
    "assert len(values()) == 6 and values()[4] == 2**4000 and values()['a'] == [1, (2, {3}), None, True]",
    "v = values(); assert v['n'] == float('inf') and v['b'] == b'x\\\\xff' and v['s'] == '\\\\ud800é'"
    " and v['f'] == 0.1",
    "import collections, decimal, fractions\\nk = kinds()\\nassert k[0] == collections.Counter('aab')"
    " and k[0].most_common(1) == [('a', 2)]\\nassert k[1:7] == [collections.deque([1]), decimal.Decimal('1.5'),"
    " fractions.Fraction(1, 3),"
    " frozenset({1}), range(3), 1 + 2j]\\nassert k[7] == k[8] == {'a': 1}",
    "l = [1, 2, 3]; alias = l; turn(l); assert alias == [[9], 2, 1]",
    "m = {}; fill(m); assert m == {'x': 1}",
    "assert list(numbers()) == [0, 1, 2] and max(numbers()) == 2 and 1 in numbers()",
    "assert apply(lambda a, b: a - b, 5, 3) == 2 and apply(len, [1]) == 1",
    "assert total(i * i for i in range(3)) == [0, 1, 4]",
    "try:\\n    fails(1)\\nexcept ValueError as error:\\n    assert str(error) == 'no 1'\\nelse:\\n"
    "    raise AssertionError",
    "s = Stack()\\ntry:\\n    s.pop()\\nexcept Empty as error:\\n    assert str(error.args[0]) == 'nothing'\\nelse:\\n"
    "    raise AssertionError",
    "s = Stack(1).push(2); assert len(s) == 2 and s[0] == 1 and list(s) == [1, 2] and s.items == [1, 2]"
    " and s.pop() == 2",
    "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and Stack(1) < Stack(1, 2) and isinstance(Stack(), Stack)",
    "assert list(Stack(1) + Stack(2)) == [1, 2] and str(Stack(1)) == 'Stack[1]' and not Stack() and Stack(0)",
    "with Stack(1) as s:\\n    assert len(s) == 1\\nassert len(s) == 0",
    "p = Point(1, 2); p.x = 5; assert (p.x, p.y) == (5, 2) and repr(p) == 'Point(x=5, y=2)' and p == Point(5, 2)",
    "count(); count(); assert counter == 2",
    "class Thing:\\n    name = 'a'\\n    def shout(self, x): return x * 2\\nassert named(Thing()) == 'a!!'",
    "import numpy as np\\nassert double(np.arange(3)).tolist() == [0, 2, 4] and double(np.float64(2)) == 4",
]


def test_honest_programs_pass_as_in_one_process(isolated: bool) -> None:
    for test in (use.replace("\\n", "\n").replace("\\\\", "\\") for use in USES):
        module = sys.modules["solution"] = ModuleType("solution")
        exec(HONEST, module.__dict__)
        exec(test, module.__dict__)
        del sys.modules["solution"]
        assert scored(HONEST, test) == (1, 1), test
