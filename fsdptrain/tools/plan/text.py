"""Format a memory plan as text and as a mapping."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdptrain.memory.demand import GIB, MARGIN, count, gib
from fsdptrain.tools.inspect.text import facts, line, narrow_console, section, table
from fsdptrain.tools.plan.plan import Plan, Proposal, with_margin


def print_plan(plan: Plan, command: str) -> None:
    """Print the plan. `command` starts the planned run, without the flags of a proposal."""
    console = narrow_console()
    machine = plan.machine
    size = f"{count(plan.counts.total)} parameters, {machine.num_gpus} x {machine.gpu_memory / GIB:g} GiB"
    line(console, plan.model_class, size)
    section(console, "On each GPU, in GiB", _peaks_table(plan))
    choices = facts((name, gib(size)) for name, size in plan.choices.items())
    section(console, "Training, in GiB, margin included", choices)
    section(console, f"On the host of {machine.ranks_per_node} ranks, in GiB", facts(_host(plan)))
    console.print()
    if plan.fits:
        console.print(f"fits: {gib(plan.device)} of {machine.gpu_memory / GIB:g} GiB", style="bold", highlight=False)
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_verdict(plan), style="bold", markup=False, highlight=False)
    for proposal in plan.proposals:
        _print_proposal(console, proposal, command, machine.num_gpus)


def as_mapping(plan: Plan, command: str) -> dict[str, Any]:
    """Return the plan as a JSON-compatible mapping. Sizes in bytes."""
    values = asdict(plan)
    peaks = {"training": plan.training, "generation": plan.generation}
    for name, peak in peaks.items():
        values[name] = None if peak is None else {**asdict(peak), "total": peak.total}
    return {
        **values,
        "device": plan.device,
        "fits": plan.fits,
        "margin": MARGIN,
        "command": command,
        "proposals": [{**asdict(p), "command": " ".join([command, *p.flags])} for p in plan.proposals],
    }


def _peaks_table(plan: Plan) -> Table:
    peaks = [plan.training, *([plan.generation] if plan.generation else [])]
    rows = [
        (name, *(gib(peak.parts[name]) if name in peak.parts else "" for peak in peaks))
        for name in dict.fromkeys(name for peak in peaks for name in peak.parts)
    ]
    rows.append(("together", *(gib(peak.total) for peak in peaks)))
    rows.append((f"with a margin of {100 * (MARGIN - 1):.0f} %", *(gib(with_margin(peak)) for peak in peaks)))
    rows.append((f"peak at: {plan.training.name}",))
    layers = "freed" if plan.reshards else "kept"
    rows.append((f"logprobs of {plan.chunk_size} tokens at a time, layers {layers} after the forward pass",))
    return table(("",), ("training", "generation")[: len(peaks)], rows)


def _host(plan: Plan) -> Iterator[tuple[str, str]]:
    if not plan.host_parts:
        yield "nothing", "weights, gradients and optimizer state are on the GPUs"
        return
    yield from ((name, gib(size)) for name, size in plan.host_parts.items())
    limit = plan.machine.host_memory
    of = f" of {limit / GIB:g}" if limit is not None else ""
    yield "together", f"{gib(plan.host)}{of}, with a margin"


def _verdict(plan: Plan) -> str:
    device = f"{gib(plan.device)} of {plan.machine.gpu_memory / GIB:g} GiB on each GPU"
    host = plan.machine.host_memory
    if host is not None and plan.host > host:
        device += f", {gib(plan.host)} of {host / GIB:g} GiB on the host"
    ways = (
        "options that make it fit, fastest first:"
        if plan.proposals
        else "no option makes it fit, even on 16 times the GPUs"
    )
    return f"does not fit: {device}; {ways}"


def _print_proposal(console: Console, proposal: Proposal, command: str, num_gpus: int) -> None:
    where = "" if proposal.num_gpus == num_gpus else f" on {proposal.num_gpus} GPUs"
    host = f", {gib(proposal.host)} on the host" if proposal.host else ""
    console.print(f"  {gib(proposal.device)} GiB{where}{host}", highlight=False)
    console.print(f"    {' '.join([command, *proposal.flags])}", markup=False, highlight=False, soft_wrap=True)
