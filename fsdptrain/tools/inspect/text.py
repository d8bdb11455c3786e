"""Print an inspection as text: at most 100 columns, tables without borders."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdptrain.memory.estimate import count
from fsdptrain.tools.inspect.inspection import Inspection

WIDEST = 100  # columns


def print_inspection(report: Inspection) -> None:
    console = narrow_console()
    where = (f"{report.model_type}, {report.module}", "dim")
    console.print(Text.assemble((report.model_class, "bold"), "  ", where), highlight=False)
    section(console, "Parameters", facts([*_parameter_rows(report.parameters), ("head", report.head)]))
    section(console, "Computation", facts(_computation(report)))


def narrow_console() -> Console:
    console = Console()
    return console if console.width <= WIDEST else Console(width=WIDEST)


def section(console: Console, title: str, rows: Table) -> None:
    console.print()
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(Padding(rows, (0, 0, 0, 2)))


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    found = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column(style="dim", no_wrap=True)
    found.add_column(overflow="fold")
    for name, value in rows:
        found.add_row(Text(name), Text(value))
    return found


def table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with columns of words, then of numbers."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in words:
        found.add_column(name, overflow="fold")
    for name in numbers:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def _parameter_rows(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    yield "total", count(counts["total"])
    if counts["active"] < counts["total"]:
        yield "active", f"{count(counts['active'])} for one token, embedding and head included"
    yield "trainable", "all" if counts["trainable"] == counts["total"] else count(counts["trainable"])
    ranks = f"{counts['num_shards']} rank{'s' * (counts['num_shards'] > 1)}"
    yield "per rank", f"{count(counts['per_rank'])} over {ranks}"


def _computation(report: Inspection) -> Iterator[tuple[str, str]]:
    yield "on", f"{report.device_type}, on this machine"
    if report.refusal:
        yield "refused", report.refusal
    if (probe := report.probe) is not None:
        difference = f"logprobs {probe.max_difference:.1g} (at most {probe.tolerance:g})"
        yield "probe", f"{probe.layout} against one by one: {difference}, on a small random copy"
    for kernel in report.kernels:
        if kernel.fell_back:
            yield f"! {kernel.part}", f"{kernel.used} instead of {kernel.wanted}: {kernel.reason}"
        else:
            yield kernel.part, kernel.used
