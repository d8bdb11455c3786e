"""Print an inspection as text: at most 100 columns, tables without borders."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdptrain.memory.demand import count
from fsdptrain.model.probes.layout import LayoutProbe
from fsdptrain.tools.inspect.inspection import Group, Head, Inspection, Parameters
from fsdptrain.tools.inspect.module_tree import Part

WIDEST = 100  # columns
_SHOWN = 8  # maximum number of names per difference


def print_inspection(report: Inspection) -> None:
    console = narrow_console()
    line(console, report.model_class, f"{report.model_type}, {report.module}")
    _section(console, "Parameters", _parameter_rows(report.parameters, report.head))
    heading(console, "Modules")
    console.print(_tree(report.parts))
    _section(console, "", _other_modules(report.parts, report.module))
    heading(console, f"FSDP groups over {_ranks(report.parameters.num_shards)}")
    console.print(_group_table(report.groups))
    _section(console, "Computation", _computation(report))
    _section(console, "Dtypes", report.dtypes.items())
    if report.differences is not None:
        _section(console, "Against the files", _differences(report.differences))


def narrow_console() -> Console:
    console = Console()
    return console if console.width <= WIDEST else Console(width=WIDEST)


def heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False, highlight=False)


def line(console: Console, first: str, rest: str) -> None:
    console.print(Text.assemble((first, "bold"), "  ", (rest, "dim")), highlight=False)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    found = facts(rows)
    if found.row_count:
        heading(console, title) if title else console.print()
        console.print(Padding(found, (0, 0, 0, 2)))


def _parameter_rows(parameters: Parameters, head: Head) -> Iterator[tuple[str, str]]:
    yield "total", count(parameters.total)
    if parameters.active < parameters.total:
        yield "active", f"{count(parameters.active)} for one token, embedding and head included"
    all_of_it = parameters.trainable == parameters.total
    yield "trainable", "all" if all_of_it else count(parameters.trainable)
    yield "per rank", f"{count(parameters.per_rank)} over {_ranks(parameters.num_shards)}"
    yield "head", f"{head.class_name}, vocabulary {head.vocab_size}{_head_notes(head)}"


def _head_notes(head: Head) -> str:
    notes = [f"tied to {head.tied_to}" if head.tied_to else "not tied"]
    notes += ["with bias"] * head.bias
    notes += [f"logits x {head.logit_scale:g}"] * (head.logit_scale != 1.0)
    notes += [] if head.softcap is None else [f"softcap {head.softcap:g}"]
    return "".join(f", {note}" for note in notes)


def _tree(parts: list[Part]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("  module", "class", "kind"):
        table.add_column(name, overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    above = ""
    for part, said in _once(_merged(parts)):
        if part.depth == 0:
            parent, name = _split(part.path)
            if parent not in ("", above):
                table.add_row(Text(f"  {parent}"))
            above = parent
        else:
            name = part.path
        indent = "  " * (part.depth + 1 + bool(above))
        if said:
            table.add_row(Text(f"{indent}as {said}"), style="dim")
            continue
        times = f"{part.count} x " if part.count > 1 else ""
        table.add_row(
            Text(indent + name),
            Text(part.class_name),
            Text(part.note or part.kind),
            Text(times + count(part.numel) if part.numel else "-"),
            style="bold" if part.kind == "layer" else "",
        )
    return table


def _other_modules(parts: list[Part], module: str) -> Iterator[tuple[str, str]]:
    """Yield the modules other than the model's that define classes of its parts, with the class names."""
    others = dict.fromkeys(part.module for part in parts if part.module != module)
    for other in others:
        if not other.startswith("torch.nn"):
            yield other, ", ".join(dict.fromkeys(part.class_name for part in parts if part.module == other))


def _short(path: str) -> str:
    return path.removeprefix("model.")


def _split(path: str) -> tuple[str, str]:
    """Split a path: `language_model` and `layers 0-4, 6-10 ...`."""
    words, space, span = _short(path).partition(" ")
    parent, _, name = words.rpartition(".")
    return parent, name + space + span


def _merged(parts: list[Part]) -> Iterator[Part]:
    """Merge the norms of a layer into one line."""
    norms: dict[tuple, list[Part]] = {}
    layer = 0
    for place, part in enumerate(parts):
        layer = place if part.depth == 0 else layer
        if part.kind == "norm" and part.depth > 0:
            norms.setdefault((layer, part.class_name, part.numel), []).append(part)
    first = {id(group[0]): group for group in norms.values()}
    for part in parts:
        group = first.get(id(part))
        if part.kind != "norm" or part.depth == 0:
            yield part
        elif group is not None:
            yield replace(part, path=f"{len(group)} norms" if len(group) > 1 else part.path, count=len(group))


def _once(parts: Iterable[Part]) -> Iterator[tuple[Part, str]]:
    """Yield (part, ""), or (part, name of the identical earlier layer) once for a repeated layer."""
    layers: list[list[Part]] = []
    for part in parts:
        if part.depth == 0:
            layers.append([])
        layers[-1].append(part)
    seen: dict[tuple, str] = {}
    for first, *inner in layers:
        yield first, ""
        facts_of_all = tuple(_facts(part) for part in inner)
        if inner and facts_of_all in seen:
            yield inner[0], seen[facts_of_all]
            continue
        seen[facts_of_all] = _split(first.path)[1]
        yield from ((part, "") for part in inner)


def _facts(part: Part) -> tuple:
    return (part.path, part.class_name, part.numel, part.count, part.depth)


def _group_table(groups: list[Group]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  group", overflow="fold")
    for name in ("parameters", "per rank", "gathered"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        times = f"{group.count} x " if group.count > 1 else ""
        size = f"{group.gathered_bytes / 1024**2:.0f} MiB"
        table.add_row(Text(f"  {_short(group.name)}"), times + count(group.parameters), count(group.per_rank), size)
    return table


def _computation(report: Inspection) -> Iterator[tuple[str, str]]:
    yield "on", f"{report.device_type}, on this machine"
    if report.refusal:
        yield "refused", report.refusal
    if report.probe is not None:
        yield "probe", _probe(report.probe)
    for kernel in report.kernels:
        if kernel.fell_back:
            yield f"! {kernel.part}", f"{kernel.used} instead of {kernel.wanted}: {kernel.reason}"
        else:
            yield kernel.part, kernel.used
    for override in report.overrides:
        yield "override", override.line


def _probe(probe: LayoutProbe) -> str:
    return (
        f"{probe.layout} against one by one: logprobs {probe.max_difference:.1g}, gradients "
        f"{probe.gradient_difference:.1g} (at most {probe.tolerance:g}), on a small random copy"
    )


def _differences(differences: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    if not differences:
        yield "all names and shapes", "the same"
    for name, found in differences.items():
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        yield f"! {name}", f"{len(found)}: {', '.join(found[:_SHOWN])}{more}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"
