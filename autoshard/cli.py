"""The command line: `autoshard demo | plan | explain | diff | report | compile | calibrate | learn | bench`."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from autoshard.api import Step, autoshard
from autoshard.cli_calibrate import calibrate_command
from autoshard.cli_learn import learn
from autoshard.errors import ArgumentError, AutoshardError, PlanError, explain
from autoshard.ir import print_spec
from autoshard.load import load_step
from autoshard.plan import Plan
from autoshard.report import write_report
from autoshard.runtime import CompiledReport, StageReport
from autoshard.search import Progress, Run, run_instance, warm_up
from autoshard.show import plan_view, seconds, size_text

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Plans how to spread a JAX train step over devices.")
bench = typer.Typer(no_args_is_help=True, help="Measures.")
app.add_typer(bench, name="bench")
app.command("calibrate")(calibrate_command)
app.command()(learn)
console = Console()
errors = Console(stderr=True)

Target = Annotated[str, typer.Argument(help="file.py:step or package.module:step", metavar="FILE:STEP")]
Inputs = Annotated[str, typer.Option(help="name, in the same file, of the step's arguments")]
Devices = Annotated[str, typer.Option(help="preset such as h100x8, cluster file (.toml), or auto; else the step's own")]
MeshText = Annotated[str, typer.Option("--mesh", help="mesh sizes such as 2,4; chosen if left out")]
Limit = Annotated[str, typer.Option(help="most memory a device may hold, such as 24GiB")]
Budget = Annotated[float, typer.Option(help="seconds for the search; 0: 20")]
Stages = Annotated[int, typer.Option(help="pipeline stages, 1 for one mesh; 0: the step's own, or chosen")]
ScheduleName = Annotated[str, typer.Option("--schedule", help="of a pipeline: 1f1b, gpipe, eager-1f1b, zb-h1, zb-h2")]
Parts = Annotated[int, typer.Option("--microbatches", help="parts that the batch is cut into; 0: chosen")]
Remat = Annotated[bool | None, typer.Option("--remat/--no-remat", help="compute parts again; chosen if left out")]
LearnedFolder = Annotated[str, typer.Option(help="folder of `autoshard learn`, to time the plan by")]
DumpDir = Annotated[str, typer.Option(help="folder for the program after every pass")]


WAYS: Mapping[str, Callable[[Plan], str]] = {
    "stages": lambda plan: "1" if plan.pipeline is None else str(len(plan.pipeline.stages)),
    "schedule": lambda plan: "-" if plan.pipeline is None else plan.pipeline.schedule,
    "microbatches": lambda plan: str(plan.microbatches),
    "gradients summed once in groups": lambda plan: str(plan.groups),
    "recomputing": lambda plan: "yes" if plan.remat else "no",
}
"""Rows of `diff` where two plans differ in them."""


@app.command()
def demo() -> None:
    """Trains a GPT on the standard library's source, sharded, and compares with one device."""
    from autoshard.demo import main as run

    raise typer.Exit(run())


@app.command()
def plan(
    target: Target,
    inputs: Inputs = "inputs",
    devices: Devices = "",
    mesh: MeshText = "",
    memory_limit: Limit = "",
    budget: Budget = 0.0,
    stages: Stages = 0,
    schedule: ScheduleName = "",
    microbatches: Parts = 0,
    remat: Remat = None,
    output: Annotated[str, typer.Option("--output", "-o", help="write the plan as JSON here")] = "",
    dump_dir: DumpDir = "",
    learned_model: LearnedFolder = "",
) -> None:
    """Plans a step and prints the plan. A decorated step keeps its options but for those given here."""
    options = _options(devices, mesh, memory_limit, budget, dump_dir) | _cuts(stages, microbatches, remat)
    options |= {"schedule": schedule} if schedule else {}
    made = _plan(target, inputs, options | ({"learned_model": learned_model} if learned_model else {}))
    console.print(plan_view(made))
    if output:
        Path(output).write_text(made.to_json())
        console.print(f"written to {output}")


@app.command("explain")
def explain_command(
    file: Annotated[str, typer.Argument(help="a plan written by `autoshard plan -o`")],
    pattern: Annotated[str, typer.Argument(help="paths of arguments, such as '*/mlp/*'")] = "*",
) -> None:
    """Says why a plan is as it is, and how the arguments that match a pattern are split."""
    made = _read(file)
    for line in (*made.why, f"solver: {made.solver}"):
        console.print(line, highlight=False, markup=False)
    rows = [a for a in (*made.inputs, *made.outputs) if fnmatch.fnmatchcase(a.path, pattern)]
    if not rows:
        paths = ", ".join(a.path for a in made.inputs[:8])
        raise ArgumentError(
            explain(f"no argument matches {pattern!r}", f"a pattern of paths such as {paths}", "correct it")
        )
    table = Table("argument", "type", "sharding", "bytes on a device")
    meshes = {a.path: made.mesh for a in (*made.inputs, *made.outputs)}
    for stage in made.pipeline.stages if made.pipeline is not None else ():
        meshes.update({a.path: stage.mesh for a in (*stage.inputs, *stage.outputs)})
    for a in rows:
        sizes, parts = dict(meshes[a.path]), 1
        for axes in a.spec:
            for axis in axes:
                parts *= sizes[axis]
        table.add_row(a.path, a.type, print_spec(a.spec), size_text(a.nbytes / parts))
    console.print(table)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="a plan")],
    second: Annotated[str, typer.Argument(help="another plan")],
) -> None:
    """Compares two plans."""
    a, b = _read(first), _read(second)
    table = Table("", first, second)
    alike = (a.microbatches, a.remat, a.groups, a.pipeline is None) == (
        b.microbatches,
        b.remat,
        b.groups,
        b.pipeline is None,
    )
    if alike:  # programs that are made of the step in other ways have other fingerprints
        table.add_row("program", a.fingerprint, b.fingerprint)
    table.add_row("devices", a.cluster, b.cluster)
    table.add_row("mesh", str(dict(a.mesh)), str(dict(b.mesh)))
    for name, of in WAYS.items():
        left, right = of(a), of(b)
        if left != right:
            table.add_row(name, left, right)
    table.add_row("step time", seconds(a.time_s), seconds(b.time_s))
    table.add_row("collectives", seconds(a.traffic_s), seconds(b.traffic_s))
    table.add_row("peak memory", size_text(a.memory.peak_bytes), size_text(b.memory.peak_bytes))
    have = {x.path: x for x in a.inputs}
    other = {x.path: x for x in b.inputs}
    for path in dict.fromkeys((*have, *other)):
        left = f"{have[path].type} {print_spec(have[path].spec)}" if path in have else "-"
        right = f"{other[path].type} {print_spec(other[path].spec)}" if path in other else "-"
        if left != right:
            table.add_row(path, left, right)
    console.print(table)


@app.command("report")
def report_command(
    file: Annotated[str, typer.Argument(help="a plan written by `autoshard plan -o`")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="the page; the plan's name with .html if left out")
    ] = "",
) -> None:
    """Writes a plan as one HTML page that works without a network: timeline, memory, shardings, costs."""
    made = _read(file)
    page = Path(output) if output else Path(file).with_suffix(".html")
    if page.exists() and page.samefile(file):
        raise ArgumentError(explain(f"{page} is the plan itself", "another file for the page", "name one with -o"))
    write_report(made, page)
    console.print(f"written to {page}", markup=False, highlight=False, soft_wrap=True)


@app.command("compile")
def compile_command(
    target: Target,
    inputs: Inputs = "inputs",
    devices: Devices = "h100x8",
    mesh: MeshText = "",
    memory_limit: Limit = "",
    budget: Budget = 0.0,
    stages: Stages = 0,
    microbatches: Parts = 0,
    remat: Remat = None,
    ptx: Annotated[str, typer.Option(help="write the kernels' PTX into this folder")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="write the report as JSON here")] = "",
) -> None:
    """Plans a step and compiles it with XLA's GPU compiler for devices that need not be here."""
    options = _options(devices, mesh, memory_limit, budget, "") | _cuts(stages, microbatches, remat)
    made = _plan(target, inputs, options)
    with _working(f"compiling for {made.cluster}"):
        compiled = made.compile(ptx=bool(ptx))
    reports: list[tuple[str, CompiledReport]] = []
    if isinstance(compiled, CompiledReport):
        reports.append(("step", compiled))
    else:
        parts: tuple[StageReport, ...] = compiled
        reports += [(f"stage {each.stage} {each.program}", each.report) for each in parts]
    for name, report in reports:
        if len(reports) > 1:
            console.print(name, style="bold")
        console.print(str(report), markup=False, highlight=False)
        if ptx and report.ptx:
            Path(ptx).mkdir(parents=True, exist_ok=True)
            (Path(ptx) / f"{name.replace(' ', '-')}.ptx").write_text(report.ptx)
    if output:
        texts = [report.to_json() for _, report in reports]
        whole = {name: json.loads(text) for (name, _), text in zip(reports, texts, strict=True)}
        Path(output).write_text(texts[0] if len(texts) == 1 else json.dumps(whole, indent=2))


@bench.command("step")
def bench_step(
    target: Target,
    inputs: Inputs = "inputs",
    devices: Devices = "auto",
    mesh: MeshText = "",
    steps: Annotated[int, typer.Option(help="measured pairs of calls")] = 20,
) -> None:
    """Times the planned step against plain `jax.jit` on one device, call by call in turn."""
    step, args, kwargs = load_step(target, inputs)
    fun = step.__wrapped__ if isinstance(step, Step) else step
    sharded = autoshard(fun, donate_argnums=(), **_options(devices, mesh, "", 0.0, ""))
    plain = jax.jit(fun)  # pyright: ignore[reportUnknownMemberType]
    with _working("planning and compiling"):
        _wait(sharded(*args, **kwargs))
        _wait(plain(*args, **kwargs))
    times: dict[str, list[float]] = {"planned": [], "plain jit, one device": []}
    for _ in range(steps):
        for name, run in (("planned", sharded), ("plain jit, one device", plain)):
            start = time.perf_counter()
            _wait(run(*args, **kwargs))
            times[name].append(time.perf_counter() - start)
    table = Table("program", "median", "fastest")
    for name, found in times.items():
        table.add_row(name, seconds(sorted(found)[len(found) // 2]), seconds(min(found)))
    console.print(table)


@bench.command("iopddl")
def bench_iopddl(
    files: Annotated[list[Path], typer.Argument(help="instances, .json or .json.gz", metavar="FILE...")],
    time_limit: Annotated[float, typer.Option(help="seconds for each instance, reading included")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the search")] = 0,
    workers: Annotated[int, typer.Option(help="threads of the search")] = 2,
    solutions: Annotated[str, typer.Option(help="folder for NAME.json, a list of strategy numbers")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="write all figures as JSON here")] = "",
) -> None:
    """Solves instances of the IOPDDL contest (ASPLOS 2025) and judges the answers.

    Columns: cost as judged from the file; cost over the best of any team; lower bound; gap between the two; peak memory
    in parts of the limit; time, reading included. Ctrl-C ends the search; the best answer so far is kept.
    """
    if time_limit <= 0 or workers < 1:
        raise ArgumentError(
            explain(f"--time-limit {time_limit:g} --workers {workers}", "seconds above 0, at least 1 worker", "correct")
        )
    with _working("compiling the solver's loops (once on a machine)"):
        warm_up()
    table = Table(Column("instance", overflow="fold"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("cost", "of best", "bound", "gap", "peak", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    runs: list[Run] = []
    for file in files:
        with errors.status(f"{file.name}: reading") as status:

            def tell(p: Progress, name: str = file.name, status: Any = status) -> None:
                gap = f", gap {(p.cost - p.bound) / p.cost:.2%}" if 0 < p.cost < float("inf") else ""
                status.update(f"{name}: {p.seconds:.0f} s, cost {p.cost:,.6g}, bound {p.bound:,.6g}{gap}")

            run = run_instance(file, time_limit_s=time_limit, seed=seed, workers=workers, tell=tell)
        runs.append(run)
        table.add_row(*_run_row(run))
        if solutions and run.answer:
            Path(solutions).mkdir(parents=True, exist_ok=True)
            (Path(solutions) / f"{run.name}.json").write_text(json.dumps(list(run.answer)))
        if run.solution.stats.get("interrupted"):
            break
    console.print(table)
    for run in runs:
        if faults := _run_faults(run):
            console.print(f"{run.name}: {faults}", markup=False, highlight=False)
    ratios = [run.ratio for run in runs if run.ratio is not None]
    if len(ratios) > 1:
        console.print(f"geometric mean of cost over best known: {math.prod(ratios) ** (1 / len(ratios)):.6f}")
    if output:
        Path(output).write_text(json.dumps([run.to_dict() for run in runs], indent=1))
    if not all(run.verdict is not None and run.verdict.legal for run in runs):
        raise typer.Exit(1)


def _run_row(run: Run) -> tuple[str, ...]:
    """A line of the benchmark's table."""
    verdict, solution = run.verdict, run.solution
    bound = f"{solution.bound:.6g}"
    cost = f"{verdict.cost:,.0f}" if verdict is not None and verdict.cost >= 1e5 else f"{solution.cost:.8g}"
    if verdict is None:
        return (run.name, "none", "-", bound, "-", "-", seconds(run.total_s))
    return (
        run.name,
        cost if verdict.legal else "not legal",
        "-" if run.ratio is None else f"{run.ratio:.6f}",
        bound,
        f"{solution.gap:.2%}",
        f"{verdict.peak / verdict.limit:.2%}" if verdict.limit else "-",
        seconds(run.total_s),
    )


def _run_faults(run: Run) -> str:
    """Why there is no legal answer; empty if there is one."""
    if run.verdict is not None:
        return "; ".join(run.verdict.faults)
    missing = run.solution.shortage
    where = f": {missing.nbytes:,.0f} bytes too much at time {missing.time}" if missing is not None else ""
    return run.solution.result.value + where


def main() -> None:
    """Entry point: errors made on purpose are printed without a traceback."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        app()
    except AutoshardError as error:
        errors.print(f"[red]error[/red] ({type(error).__name__})", end=" ")
        errors.print(str(error), markup=False, highlight=False)
        sys.exit(2)


def _cuts(stages: int, microbatches: int, remat: bool | None) -> dict[str, Any]:
    """Options that were given."""
    given = {"stages": stages or None, "microbatches": microbatches or None, "remat": remat}
    return {name: value for name, value in given.items() if value is not None}


def _options(devices: str, mesh: str, limit: str, budget: float, dump_dir: str) -> dict[str, Any]:
    options: dict[str, Any] = {"devices": devices} if devices else {}
    if mesh:
        try:
            options["mesh"] = tuple(int(n) for n in mesh.replace("x", ",").split(","))
        except ValueError as error:
            raise ArgumentError(explain(f"--mesh {mesh!r}", "sizes such as 8 or 2,4", "correct it")) from error
    if limit:
        options["memory_limit"] = limit
    if budget:
        options["budget"] = budget
    if dump_dir:
        options["dump_dir"] = dump_dir
    return options


def _plan(target: str, inputs: str, options: dict[str, Any]) -> Plan:
    step, args, kwargs = load_step(target, inputs)
    if not isinstance(step, Step):
        made: Any = autoshard(step, **options)
    else:
        made = step.with_options(**options) if options else step
    with _working(f"planning {target}"):
        return made.plan(*args, **kwargs)


def _read(file: str) -> Plan:
    try:
        return Plan.from_json(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            explain(f"{file}: {error}", "a plan written by `autoshard plan -o`", "check the path")
        ) from error


def _wait(tree: Any) -> None:
    """Until every array of a result is there."""
    jax.block_until_ready(tree)  # pyright: ignore[reportUnknownMemberType]


@contextmanager
def _working(what: str) -> Generator[None]:
    """A spinner while something slow runs, then how long it took."""
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)


if __name__ == "__main__":
    main()
