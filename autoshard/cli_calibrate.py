"""`autoshard calibrate`: measures the devices at hand and writes a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from autoshard.calibrate import Progress, calibrate
from autoshard.errors import ArgumentError, explain
from autoshard.show import seconds

console = Console()


def calibrate_command(
    output: Annotated[str, typer.Option("--output", "-o", help="the cluster file to write")] = "cluster.toml",
    budget: Annotated[float, typer.Option(help="seconds; about 120, or 20 with --quick")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="few sizes and operators")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="go on from an interrupted run, or start anew")
    ] = True,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the first process, to measure the network too")] = "",
    processes: Annotated[int, typer.Option(help="how many processes take part")] = 1,
    process: Annotated[int, typer.Option(help="number of this one, from 0")] = 0,
) -> None:
    """Measures the devices at hand: products, bandwidth, functions, collectives; writes a cluster file.

    Measurements are kept beside the output as they are made; a run that was interrupted goes on from there. With
    --coordinator all processes run the same command, each with its own --process; the first one writes the file.
    """
    if processes > 1 and not coordinator:
        raise ArgumentError(
            explain(f"--processes {processes} without --coordinator", "HOST:PORT of the first process", "add it")
        )
    if coordinator:
        jax.distributed.initialize(coordinator, processes, process)
    path = Path(output)
    cache = path.with_name(path.name + ".measurements.jsonl")
    first = process == 0
    bar = Bar(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not first,
    )
    try:
        with bar:
            task = bar.add_task("starting", total=None, left="")

            def tell(now: Progress) -> None:
                left = f"{seconds(now.left_s)} left"
                bar.update(task, description=now.key, completed=now.done, total=now.total, left=left)

            found = calibrate(budget_s=budget or None, quick=quick, cache=cache, fresh=not resume, tell=tell)
            bar.update(task, description="done", completed=len(found.record.measured), left="")
    except KeyboardInterrupt:
        console.print(f"stopped; what was measured is in {cache}: the same command goes on", soft_wrap=True)
        raise typer.Exit(130) from None
    if not first:
        return
    path.write_text(found.to_toml(), encoding="utf-8")
    console.print(found.cluster.describe(), markup=False, highlight=False)
    for level, error in found.record.errors.items():
        console.print(f"  collectives of the {level}: one latency and bandwidth fit to {error:.1%}", highlight=False)
    wide = sorted(found.record.measured.items(), key=lambda item: -item[1].spread)
    console.print(f"  widest spread: {wide[0][0]} {wide[0][1].spread:.1%}", markup=False, highlight=False)
    console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
