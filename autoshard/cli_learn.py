"""`autoshard learn`: measures random programs on this machine, trains the learned cost model, says how good it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from autoshard.costmodel import (
    SAMPLES,
    WITHIN,
    Learned,
    LearnOptions,
    Score,
    collect_samples,
    good_samples,
    learn_model,
    make_samples,
    one_core,
    read_samples,
    wanted_programs,
)
from autoshard.errors import ArgumentError, explain

console = Console()


def learn(
    programs: Annotated[int, typer.Option(help="train steps to measure")] = 1000,
    minutes: Annotated[float, typer.Option(help="most minutes of measuring")] = 20.0,
    output: Annotated[str, typer.Option("--output", "-o", help="folder for samples and model")] = "learned-model",
    seed: Annotated[int, typer.Option(help="of programs, split and training")] = 0,
    resume: Annotated[
        bool, typer.Option(help="keep the samples that the folder has, and measure what is missing")
    ] = True,
    workers: Annotated[int, typer.Option(help="programs measured at once, each on a core of its own")] = 1,
    train_minutes: Annotated[float, typer.Option(help="most minutes of training, in CPU time")] = 5.0,
    members: Annotated[int, typer.Option(help="networks trained; their predictions are averaged")] = 3,
) -> None:
    """Measures random programs on this machine, trains the learned cost model, and compares it with the analytic one.

    Ctrl-C while measuring keeps what is measured and goes on with it.
    """
    if min(programs, workers, members) < 1 or minutes < 0 or train_minutes <= 0:
        raise ArgumentError(
            explain(
                f"--programs {programs} --minutes {minutes:g} --workers {workers} --train-minutes {train_minutes:g} "
                f"--members {members}",
                "at least one program, worker and network, minutes above 0",
                "correct",
            )
        )
    folder = Path(output)
    samples_file = folder / SAMPLES
    if samples_file.exists() and not resume:
        samples_file.unlink()
    counts = _collect(samples_file, programs, minutes, seed, workers)
    with _progress() as progress:
        task = progress.add_task("reading programs", total=None)
        records = read_samples(samples_file)
        samples = make_samples(
            records, one_core(), lambda done, all_: progress.update(task, completed=done, total=all_)
        )
    options = LearnOptions(seconds=train_minutes * 60, members=members, seed=seed)
    with _progress() as progress:
        task = progress.add_task("training", total=options.epochs)

        def tell(epoch: int, epochs: int, loss: float, validation: float) -> None:
            progress.update(
                task, completed=epoch, description=f"training: loss {loss:.4f}, validation {validation:.4f}"
            )

        found = learn_model(samples, folder, options, counts, split_seed=seed, tell=tell)
    console.print(score_table(found))
    for kind, won in found.record["wins"].items():
        console.print(f"{kind}s: the {'learned' if won else 'analytic'} model is used", highlight=False)
    console.print(f"written to {folder}", highlight=False)


def _collect(file: Path, programs: int, minutes: float, seed: int, workers: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1] * workers
    with _progress() as progress:
        task = progress.add_task("measuring", total=programs)

        def tell(done: int, wanted: int, record: Mapping[str, Any]) -> None:
            progress.update(task, completed=done, total=wanted, description=f"measuring step {record['seed']}")

        done = collect_samples(
            file,
            wanted_programs(programs, seed),
            dict(os.environ),
            cores=cores[-workers:],
            minutes=minutes,
            tell=tell,
        )
    console.print(
        f"measured {done.measured}, too noisy {done.noisy}, failed {done.failed}, there before {done.there}, "
        f"{done.seconds:.0f} s",
        highlight=False,
    )
    records = read_samples(file)
    return asdict(done) | {"records": len(records), "good": len(good_samples(records))}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def score_table(found: Learned) -> Table:
    """Scores on the held-out programs, and how well two sessions of measuring agree."""
    return scores_table((*found.held_out, *found.control, *found.repeats))


def scores_table(scores: Sequence[Score]) -> Table:
    """A line a model and kind."""
    table = Table("model", "of", title="programs never seen")
    for heading in ("count", f"within {WITHIN:.0%}", "median error", "90 % below", "rank correlation"):
        table.add_column(heading, justify="right")
    for s in scores:
        figures = (f"{s.within:.1%}", f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.rank:.3f}")
        table.add_row(s.model, s.kind, str(s.count), *(figures if s.count else ("-",) * 4))
    return table
