"""The sharding problem as an integer linear program, solved by python-mip (HiGHS).

    variables    x[i,s] in {0,1}      node i takes choice s
                 z[e,k] in [0,1]      the tuple of choices k is taken at table e of two or more nodes
    objective    min  sum_i sum_s c_i[s] x[i,s] + sum_e sum_k E_e[k] z[e,k]                          (objective)
    one choice   sum_s x[i,s] = 1                                            for all i              (one_choice)
    linking      sum_{k: k_i = s} z[e,k] = x[i,s]                            for all e, i in e, s   (linking)
    memory       base_t + sum_(l live at t) sum_s u_l[s] x[i_l,s] <= limit   for all t              (memory)

Alpa's ILP (Zheng et al., OSDI 2022, section 4.2) with the linearisation that is tight on trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import mip  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from autoshard.search.eliminate import Table
from autoshard.search.problem import Floats, Usage

SOLVER = mip.HIGHS
"""CBC (python-mip's default) is quicker on the smallest, but ended a process with "double free" under a time limit."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory rows of a program.

    Attributes:
      usages: what nodes hold, and when.
      base: bytes at each time whatever is chosen.
      limit: most bytes.
    """

    usages: Sequence[Usage]
    base: Floats
    limit: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What to solve.

    Attributes:
      sizes: number of choices of each node.
      tables: cost tables over one or more nodes; infinite entries are not allowed.
      memory: memory rows, or None.
      soft: leave the costs out and minimise what the limit has to be raised by instead.
    """

    sizes: Mapping[int, int]
    tables: Sequence[Table]
    memory: Memory | None
    soft: bool = False


@final
@dataclass(frozen=True, slots=True)
class IlpAnswer:
    """What the solver returned.

    Attributes:
      choice: node to choice; empty if none was found.
      bound: lower bound of the objective.
      proved: whether the choice is optimal (or, if empty, infeasibility is proved).
    """

    choice: dict[int, int]
    bound: float
    proved: bool


def solve_ilp(program: Program, *, budget_s: float, start: dict[int, int] | None, seed: int) -> IlpAnswer:
    """Solves one program.

    Args:
      program: what to solve.
      budget_s: time limit, seconds.
      start: a full choice to begin with.
      seed: of the solver.
    """
    scale = _scale(program.tables)
    model: Any = mip.Model(sense=mip.MINIMIZE, solver_name=SOLVER)
    model.verbose = 0
    model.seed = seed
    model.max_mip_gap = 1e-9  # its default would call 1e-4 optimal
    x = {i: [model.add_var(var_type=mip.BINARY) for _ in range(n)] for i, n in program.sizes.items()}
    for variables in x.values():
        model += _sum(variables) == 1
    terms = _objective(model, x, program.tables, scale)
    excess = model.add_var(lb=0.0) if program.soft else None
    model.objective = mip.minimize(_sum(terms) if excess is None else excess)
    if program.memory is not None:
        _memory(model, x, program.memory, excess)
    if start is not None:
        model.start = [(x[i][s], 1.0) for i, s in start.items()]
    status = model.optimize(max_seconds=max(budget_s, 0.1))
    infeasible = status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)
    if model.num_solutions == 0:
        return IlpAnswer({}, float("inf") if infeasible else float("-inf"), infeasible)
    choice = {i: int(np.argmax([v.x for v in variables])) for i, variables in x.items()}
    proved = status is mip.OptimizationStatus.OPTIMAL
    return IlpAnswer(choice, float(model.objective_bound) * scale, proved)


def _sum(terms: Sequence[Any]) -> Any:
    """mip's sum, typed."""
    return mip.xsum(terms)  # pyright: ignore[reportUnknownMemberType]


def _scale(tables: Sequence[Table]) -> float:
    """Costs are divided by this: step times in seconds are too small for the solver's tolerances."""
    finite = [float(np.max(t[np.isfinite(t)], initial=0.0)) for _, t in tables]
    return max(max(finite, default=0.0) / 1e3, 1e-30)


def _objective(model: Any, x: dict[int, list[Any]], tables: Sequence[Table], scale: float) -> list[Any]:
    """(objective) and (linking)."""
    terms: list[Any] = []
    for scope, table in tables:
        if len(scope) == 1:
            for s, cost in enumerate(table):
                if np.isfinite(cost):
                    terms.append(float(cost) / scale * x[scope[0]][s])
                else:
                    model += x[scope[0]][s] == 0
            continue
        z = {k: model.add_var(lb=0.0, ub=1.0) for k in zip(*np.nonzero(np.isfinite(table)), strict=True)}
        terms += [float(table[k]) / scale * v for k, v in z.items() if table[k] != 0]
        for position, node in enumerate(scope):
            by_choice: list[list[Any]] = [[] for _ in x[node]]
            for k, v in z.items():
                by_choice[k[position]].append(v)
            for s, members in enumerate(by_choice):
                model += _sum(members) == x[node][s]
    return terms


def _memory(model: Any, x: dict[int, list[Any]], memory: Memory, excess: Any | None) -> None:
    """(memory), in units of the limit."""
    unit = memory.limit if memory.limit > 0 else 1.0
    rows: list[dict[tuple[int, int], float]] = [{} for _ in memory.base]
    for u in memory.usages:
        held = [(s, nbytes / unit) for s, nbytes in enumerate(u.nbytes.tolist()) if nbytes]
        for row in rows[u.start : u.end]:
            for s, part in held:
                row[u.node, s] = row.get((u.node, s), 0.0) + part
    for base, row in zip(memory.base.tolist(), rows, strict=True):
        if row or base > memory.limit:
            terms = [part * x[i][s] for (i, s), part in row.items()]
            if excess is not None:
                terms.append(-1.0 * excess)
            model += _sum([*terms, 0.0 * x[next(iter(x))][0]]) <= (memory.limit - base) / unit
