"""Rewards that cannot be imported, do not fit their calls, raise, hang or return something else."""

from campaigns.inputs.case import Case, Prepare, with_file


def reward(code: str, *more: str) -> Prepare:
    """`more` is given after --reward bad:f."""
    return with_file("bad.py", code, "--reward", *(more or ("bad:f",)))


def returns(value: str) -> str:
    return f"def f(prompt, response):\n    return {value}\n"


UNSCORED = "--max-unscored-fraction"
HANGING = ("bad:f", "--reward-timeout", "0.5")
REWARDS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("missing module", reward("", "nothing:f"), ("--reward", "nothing")),
    ("missing function", reward(""), ("--reward", "bad")),
    ("no function name", reward("", "bad:"), ("--reward", "bad:")),
    ("no module name", reward("", ":f"), ("--reward", ":f")),
    ("two colons", reward("", "bad:f:g"), ("--reward", "bad:f:g")),
    ("dots", reward("", "..bad:f"), ("--reward", "..bad:f")),
    ("unknown name", reward("", "exactly"), ("--reward", "exact")),
    ("weight is text", reward(returns("1"), "bad:f=x"), ("--reward", "bad:f=x")),
    ("weight is nan", reward(returns("1"), "bad:f=nan"), ("--reward", "bad:f=nan")),
    ("same reward twice", reward(returns("1"), "bad:f", "bad:f"), ("--reward",)),
    ("syntax error", reward("def f(:\n"), ("--reward", "bad")),
    ("import raises", reward("1 / 0\n"), ("--reward", "ZeroDivisionError")),
    ("import exits", reward("import sys; sys.exit(0)\n"), ("--reward", "SystemExit")),
    ("import needs a missing module", reward("import nothing_here\n"), ("--reward", "nothing_here")),
    (
        "not UTF-8",
        with_file("bad.py", b"x = '\xff'\n", "--reward", "bad:f"),
        ("--reward",),
    ),
    ("a number", reward("f = 3\n"), ("--reward", "bad:f")),
    ("a class", reward("class f: pass\n"), ("--reward", "bad:f")),
    ("no arguments", reward("def f(): return 1\n"), ("--reward", "bad:f")),
    ("one argument", reward("def f(prompt): return 1\n"), ("--reward", "bad:f")),
    ("three arguments", reward("def f(a, b, c): return 1\n"), ("--reward", "bad:f")),
    ("generator", reward("def f(a, b):\n    yield 1\n"), ("--reward",)),
    ("raises", reward("def f(a, b): raise ValueError('one\\ntwo\\nthree\\nfour')\n"), (UNSCORED, "ValueError: one")),
    ("raises a long text", reward("def f(a, b): raise ValueError('x' * 10**6)\n"), (UNSCORED, "ValueError")),
    ("exits", reward("def f(a, b): raise SystemExit(0)\n"), ("--reward", "SystemExit")),
    ("recurses", reward("def f(a, b): return f(a, b)\n"), (UNSCORED, "RecursionError")),
    ("returns None", reward(returns("None")), ("--reward", "None")),
    ("returns nan", reward(returns("float('nan')")), (UNSCORED, "nan")),
    ("returns inf", reward(returns("float('inf')")), (UNSCORED, "inf")),
    ("returns 1e30", reward(returns("1e30")), (UNSCORED, "1e+30")),
    ("returns 10**400", reward(returns("10**400")), (UNSCORED, "OverflowError")),
    ("returns text", reward(returns("'1'")), ("--reward bad:f", "first row")),
    ("returns a list", reward(returns("[1.0]")), ("--reward bad:f", "first row")),
    ("returns a complex number", reward(returns("1j")), ("--reward bad:f", "first row")),
    ("returns a vector", reward("import torch\n" + returns("torch.zeros(3)")), (UNSCORED,)),
    ("returns an empty mapping", reward(returns("{}")), ("--reward",)),
    ("returns a mapping of texts", reward(returns("{'reward': 'a'}")), ("--reward bad:f", "first row")),
    ("returns a mapping with a number as key", reward(returns("{1: 1.0}")), ("--reward bad:f", "first row")),
    ("hangs", reward("import time\ndef f(a, b): time.sleep(999)\n", *HANGING), ("--reward-timeout",)),
    ("computes for ever", reward("def f(a, b):\n    while True: pass\n", *HANGING), ("--reward-timeout",)),
    ("data of another reward", reward("", "environment"), ("--reward environment",)),
]


def cases() -> list[Case]:
    def row(name: str, prepare: Prepare, texts: tuple[str, ...]) -> Case:
        return Case("reward", name, prepare, texts, variables={"PYTHONPATH": "."})

    return [row(*each) for each in REWARDS]
