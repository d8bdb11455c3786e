"""Variables of the environment that are wrong, or that must not matter."""

from campaigns.inputs.case import Case, flags

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
ENVIRONMENTS: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("RANK alone", {"RANK": "0"}, ("WORLD_SIZE",)),
    ("RANK is text", {**RANK, "RANK": "zero"}, ("RANK=zero",)),
    ("RANK is empty", {**RANK, "RANK": ""}, ("RANK",)),
    ("RANK is negative", {**RANK, "RANK": "-1"}, ("RANK=-1",)),
    ("RANK beyond the world", {**RANK, "RANK": "1"}, ("RANK=1",)),
    ("WORLD_SIZE 0", {**RANK, "WORLD_SIZE": "0"}, ("WORLD_SIZE=0",)),
    ("WORLD_SIZE huge", {**RANK, "WORLD_SIZE": "9" * 30}, ("WORLD_SIZE",)),
    ("LOCAL_RANK beyond", {**RANK, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "1"}, ("LOCAL_RANK=3",)),
    ("no MASTER_ADDR", {**RANK, "MASTER_ADDR": ""}, ("MASTER_ADDR",)),
    (
        "MASTER_ADDR unknown",
        {**RANK, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid"},
        ("no.such.host",),
    ),
    ("MASTER_PORT text", {**RANK, "MASTER_PORT": "x"}, ("MASTER_PORT=x",)),
    ("MASTER_PORT 70000", {**RANK, "MASTER_PORT": "70000"}, ("MASTER_PORT=70000",)),
    ("nobody at MASTER_PORT", {**RANK, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29998"}, ("29998",)),
    ("restart count is text", {"TORCHELASTIC_RESTART_COUNT": "x"}, ("TORCHELASTIC_RESTART_COUNT=x",)),
]
# A variable of another program that is broken, and which does not concern this run: the run must work.
HARMLESS: list[tuple[str, dict[str, str]]] = [
    ("OMP_NUM_THREADS is text", {"OMP_NUM_THREADS": "abc"}),
    ("OMP_NUM_THREADS 0", {"OMP_NUM_THREADS": "0"}),
    ("CUDA_VISIBLE_DEVICES nonsense", {"CUDA_VISIBLE_DEVICES": "x,y,99"}),
    ("HF_HOME is a file", {"HF_HOME": "/etc/hostname"}),
    ("HF_HOME below a device", {"HF_HOME": "/dev/null/x"}),
    ("TMPDIR missing", {"TMPDIR": "/proc/nowhere"}),
    ("PYTHONPATH missing", {"PYTHONPATH": "/nowhere:\t:"}),
    ("HOME missing", {"HOME": "/proc/nowhere"}),
    ("HOME empty", {"HOME": ""}),
    ("LANG unknown", {"LANG": "xx_YY", "LC_ALL": "xx_YY.nothing"}),
    ("ASCII only", {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    ("TERM unknown", {"TERM": "nothing", "COLUMNS": "x"}),
    ("COLUMNS 0", {"COLUMNS": "0", "LINES": "0"}),
    ("LOCAL_RANK without RANK", {"LOCAL_RANK": "5", "WORLD_SIZE": "7"}),
    ("proxy nonsense", {"HTTP_PROXY": "nonsense", "https_proxy": "::::"}),
    ("TORCH_LOGS unknown", {"TORCH_CPP_LOG_LEVEL": "nothing"}),
    ("TORCHELASTIC_ERROR_FILE cannot be written", {"TORCHELASTIC_ERROR_FILE": "/nowhere/x"}),
    ("launcher's pid is text", {"FSDPTRAIN_LAUNCHER_PID": "x"}),
    ("launcher's pid is gone", {"FSDPTRAIN_LAUNCHER_PID": "999999999"}),
]


def cases() -> list[Case]:
    wrong = [
        Case("environment", name, flags("--dist-timeout", "5"), texts, variables=variables, is_fresh=True)
        for name, variables, texts in ENVIRONMENTS
    ]
    harmless = [
        Case(
            "environment",
            name,
            flags("--num-rollout", "0", "--no-export"),
            (),
            0,
            variables,
            is_fresh=True,
            why="does not matter",
        )
        for name, variables in HARMLESS
    ]
    return wrong + harmless
