"""The plan's shardings in the graph: golden print, same values, every value where the plan wants it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.ir import Apply, Graph, Reshard, Spec, Value, evaluate, print_graph, verify
from autoshard.passes import Constrain
from autoshard.plan import Decisions, graph_operands, graph_outputs, graph_values
from autoshard.search import prepare
from tests.golden import check_golden
from tests.problems import Step, looped, mlp, normal, random_step

GOLDEN = Path(__file__).parent / "golden"
ROWS: Spec = (("data",), ())
COLUMNS: Spec = ((), ("data",))
WHOLE: Spec = ((), ())


def product() -> Step:
    return Step(lambda x, w: [jnp.tanh(x @ w) @ w, x @ w], (normal(0, 8, 8), normal(1, 8, 8)), 0)


def annotated() -> Step:
    """A user's own sharding constraint."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    wish = NamedSharding(mesh, PartitionSpec("data"))
    return Step(lambda x: [jax.lax.with_sharding_constraint(jnp.sin(x), wish) + 1], (normal(0, 8, 8),), 0)


STEPS: dict[str, Callable[[], Step]] = {"product": product, "mlp": mlp, "looped": looped, "annotated": annotated}


def alternate(graph: Graph) -> Decisions:
    """Fixed decisions, whatever things cost: values split by their first dimension, second operands wanted whole."""

    def first(shape: tuple[int, ...]) -> Spec:
        return tuple(("data",) if d == 0 and n % 8 == 0 else () for d, n in enumerate(shape))

    values = {v: first(v.shape) for v in graph_values(graph) if v.shape}
    operands = {(e, k): ((),) * len(e.inputs[k].shape) for e, k in graph_operands(graph) if k == 1}
    outputs = {(g, k): first(g.outputs[k].shape) for g, k in graph_outputs(graph)}
    return Decisions(values, operands, outputs, {})


@pytest.mark.parametrize("name", STEPS)
def test_golden(name: str, update_golden: bool) -> None:
    step = STEPS[name]()
    graph = prepare(step.graph())
    after = Constrain(alternate(graph)).apply(graph)
    verify(after)
    check_golden(GOLDEN / f"constrain-{name}.txt", print_graph(after), update_golden)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("name", [*STEPS, *range(5)])
def test_computes_the_same(name: str | int, shape: tuple[int, ...]) -> None:
    if name == "annotated" and shape != (8,):
        pytest.skip("its constraint is on a mesh of one axis")
    step = random_step(name) if isinstance(name, int) else STEPS[name]()
    before = prepare(step.graph())
    text = print_graph(before)
    after = Constrain(step.plan(shape).decisions(before)).apply(before)
    verify(after)
    assert print_graph(before) == text, "a pass never mutates its input"
    for mine, plain in zip(evaluate(after, step.args), evaluate(before, step.args), strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("name", ["product", "mlp", "looped"])
def test_everything_stands_where_the_plan_wants_it(name: str) -> None:
    step = STEPS[name]()
    graph = prepare(step.graph())
    decisions = step.plan((2, 4)).decisions(graph)
    after = Constrain(decisions).apply(graph)
    stands = specs_of(after, dict(decisions.values))
    assert any(any(spec) for spec in stands.values())

    def check(old: Graph, new: Graph) -> None:
        kept = [e for e in new.equations if isinstance(e, Apply)]
        olds = [e for e in old.equations if e.name != "sharding_constraint"]
        assert [e.name for e in kept] == [e.name for e in olds]
        for was, now in zip(olds, kept, strict=True):
            for k, atom in enumerate(now.inputs):
                want = decisions.operands.get((was, k))
                if want is not None and isinstance(atom, Value):
                    assert stands[atom] == want, f"operand {k} of {was.name}"
            for inner, outer in zip(was.graphs, now.graphs, strict=True):
                check(inner, outer)
        for k, atom in enumerate(new.outputs):
            want = decisions.outputs.get((old, k))
            if want is not None and isinstance(atom, Value) and atom in stands:
                assert stands[atom] == want, f"output {k}"

    check(graph, after)


def specs_of(graph: Graph, known: dict[Value, Spec]) -> dict[Value, Spec]:
    for e in graph.equations:
        if isinstance(e, Reshard):
            known[e.output] = e.spec
        for body in e.graphs:
            specs_of(body, known)
    return known


def decide(graph: Graph, operand: Spec, detours: dict[tuple[Spec, Spec], tuple[Spec, ...]]) -> Decisions:
    """`x` by rows, both products by columns, `x` wanted in `operand` by the first one."""
    x = graph.inputs[0]
    values = {x: ROWS} | {e.outputs[0]: COLUMNS for e in graph.equations}
    first = graph.equations[0]
    ways = {((8, 8), source, target): way for (source, target), way in detours.items()}
    return Decisions(values, {(first, 0): operand, (graph.equations[-1], 0): operand}, {}, ways)


def resharded(graph: Graph) -> list[Spec]:
    return [e.spec for e in graph.equations if isinstance(e, Reshard) and e.explicit]


def twice() -> Graph:
    return Step(lambda x, w: [x @ w, w @ x], (normal(0, 8, 8), normal(1, 8, 8)), 0).graph()


def test_a_value_moves_once_to_each_spec() -> None:
    graph = Step(lambda x, w: [x @ w, x @ w.T], (normal(0, 8, 8), normal(1, 8, 8)), 0).graph()
    after = Constrain(decide(graph, WHOLE, {})).apply(graph)
    assert resharded(after) == [WHOLE]
    verify(after)


def test_a_value_that_is_there_does_not_move() -> None:
    graph = twice()
    assert resharded(Constrain(decide(graph, ROWS, {})).apply(graph)) == []


def test_detours_are_gone_through() -> None:
    graph = Step(lambda x, w: [x @ w], (normal(0, 8, 8), normal(1, 8, 8)), 0).graph()
    after = Constrain(decide(graph, COLUMNS, {(ROWS, COLUMNS): (WHOLE, COLUMNS)})).apply(graph)
    assert resharded(after) == [WHOLE, COLUMNS]
    verify(after)


def test_source_locations_stay() -> None:
    step = mlp()
    graph = prepare(step.graph())
    after = Constrain(step.plan().decisions(graph)).apply(graph)
    places = {id(e.place) for e in graph.equations}
    assert all(id(e.place) in places for e in after.equations)
