"""A sharded graph as one device's operations: what the memory estimate looks at.

    program ::= Program(nodes: Node*, inputs: ref*, outputs: ref*)
    node    ::= Node(fusing, nbytes, operands: ref*, bodies: Program*, scratch)        ref: number of a node
    fusing  ::= LOOP | REDUCE | ALONE | PART | INPUT

Each node makes one buffer of `nbytes`. An operation with several results is a node without bytes and one PART for each
result. What the partitioner adds stands as nodes of its own: raw partial sums and their all-reduces, the copies that a
resharding goes through, the copies that bring a product's operands into the order that the library call wants.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax.numpy as jnp

from autoshard import jax_compat
from autoshard.costmodel.fusion import FusionClass, fusion_class
from autoshard.costmodel.primitives import RANDOM, REDUCTIONS, SCATTERS, TRANSCENDENTAL
from autoshard.ir import Apply, Atom, Equation, Graph, Spec, Value, aval_bytes, local_bytes, local_shape


@final
class Fusing(enum.Enum):
    """How a node fuses; see `memory_fusion.py`."""

    LOOP = "loop"
    REDUCE = "reduce"
    ALONE = "alone"
    PART = "part"
    INPUT = "input"


@final
@dataclass(slots=True, eq=False)
class Node:
    """One operation on one device; built once, then only read.

    Attributes:
      fusing: how it fuses.
      nbytes: of its result.
      operands: numbers of the nodes it reads.
      bodies: of control flow.
      value: what it is in the graph, None for what the partitioner adds.
      elementwise: for each operand whether each element of the result needs just the same element of it.
      reuses: for each operand whether elements of it are read more than once.
      expensive: whether XLA does not compute it twice.
      scratch: further bytes while it runs.
      in_place: operand whose buffer the result takes over if it dies here, whatever the shape; -1 for none.
      solid: whether it is never fused into its readers.
      sums: whether it combines the devices' partial sums.
      collective: whether devices exchange data in it.
      elements: of its result, 0 for what the partitioner adds.
      work: of computing it, in bytes through memory that take a GPU as long.
      written: whether its result goes through memory.
    """

    fusing: Fusing
    nbytes: int
    operands: tuple[int, ...]
    value: Value | None = None
    elementwise: tuple[bool, ...] = ()
    reuses: tuple[bool, ...] = ()
    expensive: bool = False
    bodies: tuple[Program, ...] = ()
    scratch: int = 0
    in_place: int = -1
    solid: bool = False
    sums: bool = False
    collective: bool = False
    elements: int = 0
    work: float = 0.0
    written: bool = False


@final
@dataclass(slots=True, eq=False)
class Program:
    """Nodes of one computation, each after its operands.

    Attributes:
      nodes: all of them.
      inputs: numbers of the inputs (constants included).
      outputs: number of each output's node, -1 for literals.
      carried: (input, output) pairs that must end up in one buffer.
    """

    nodes: list[Node] = field(default_factory=list[Node])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    carried: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """What a plan says, as far as memory goes. Without entries nothing is split and nothing moves.

    Attributes:
      sizes: of the mesh axes.
      specs: of each value.
      operands: for (equation, operand) the spec it must arrive in.
      outputs: for (graph, output) the spec it must leave in.
      partial: for an equation whose results are partial sums, the axes that a reduce-scatter leaves split.
      route: specs to go through from one to another, the target last.
    """

    sizes: Mapping[str, int]
    specs: Mapping[Value, Spec]
    operands: Mapping[tuple[Equation, int], Spec]
    outputs: Mapping[tuple[Graph, int], Spec]
    partial: Mapping[Equation, tuple[str, ...]]
    route: Callable[[Value, Spec, Spec], Sequence[Spec]]


WHOLE = Sharding({}, {}, {}, {}, {}, lambda value, source, target: (target,))
"""The program as written, on one device."""

RANDOM_WORDS = 4
"""Buffers of the result's size that a threefry call holds besides it: two halves of the counter, two of the state.
JAX's CPU lowering is a loop over rounds with these as carries."""

CUBLAS_WORKSPACE = 4 << 20
"""Bytes for the library that multiplies complex numbers, which Triton kernels do not (seen, without a GPU)."""

TREE_WINDOW = 32
"""Reductions over more elements than this along one dimension go through a reduce-window, which fuses with nothing
(XLA:CPU, cpu_compiler.cc, TreeReductionRewriter)."""

PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
"""What XLA:CPU computes in float32 where types are narrower (cpu_float_support.cc). Operands of matrix products are
kept in float32 (seen in buffer assignments); to count those of convolutions so was 23 % too much for ResNet-50."""

LAPACK = frozenset(
    (
        "cholesky",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    )
)
"""Library calls that overwrite their first operand, in column-major order."""

_EXPENSIVE = frozenset(TRANSCENDENTAL) | REDUCTIONS | {"div", "rem", "integer_pow"}
"""XLA, instruction_fusion.cc, IsExpensive; `integer_pow` becomes products, of which only the first are cheap."""

_WORK = {"tanh": 12.0, "exp": 2.0, "exp2": 2.0, "rsqrt": 2.0, "sqrt": 2.0, "log": 4.0, "logistic": 3.0, "div": 1.0}
"""Bytes through memory that take as long as an element. XLA's model of an H100 writes the tanh of GPT-2's gelu in bf16
(8 bytes less to compute it again) and computes it again in f32 (16); the others by the cycles that XLA measured of them
and of tanh (hlo_op_profiles_data.h, sm_90)."""

_WORK_OF_OTHERS = 6.0
"""Of transcendental functions not in `_WORK`: between log1p and tanh."""

_REUSING = frozenset(("broadcast_in_dim", "broadcast_to", "gather", "tile", "reduce_window_sum", "concatenate", "pad"))
_MOVING = _REUSING | {
    "transpose",
    "rev",
    "slice",
    "dynamic_slice",
    "dynamic_update_slice",
    "split",
    "iota",
    "expand_dims",
}


def build_program(
    graph: Graph, sharding: Sharding, kind: str, written: Callable[[Value], bool] | None = None
) -> Program:
    """One device's operations.

    Args:
      graph: the prepared graph.
      sharding: what moves where.
      kind: of the device, "cpu" or "gpu".
      written: for a GPU, whether a value goes through memory.
    """
    return _Builder(sharding, kind, written).program(graph)


@final
class _Builder:
    def __init__(self, sharding: Sharding, kind: str, written: Callable[[Value], bool] | None) -> None:
        self.sharding = sharding
        self.cpu = kind == "cpu"
        self.written = written
        self.bytes_of: dict[tuple[Any, Any, Any], int] = {}

    def size(self, value: Value, spec: Spec | None) -> int:
        key = (value.shape, value.dtype, spec)
        found = self.bytes_of.get(key)
        if found is None:
            found = aval_bytes(value.aval) if spec is None else local_bytes(value.aval, spec, self.sharding.sizes)
            self.bytes_of[key] = found
        return found

    def program(self, graph: Graph) -> Program:
        return _Scope(self).graph(graph)


@final
class _Scope:
    """One computation as it is built."""

    def __init__(self, builder: _Builder) -> None:
        self.b = builder
        self.s = builder.sharding
        self.out = Program()
        self.at: dict[Value, int] = {}
        self.moved: dict[tuple[Value, Spec], int] = {}
        self.invariant: dict[Value, tuple[_Scope, int]] = {}  # inputs that no trip changes: where they come from
        self.hoisted: list[int] = []  # nodes of the scope around that were made for this one
        self.wide: dict[int, int] = {}  # in single precision, what XLA:CPU multiplies so
        self.turned: dict[Value, tuple[int, int, tuple[int, ...]]] = {}  # transposes: node, what it reads, which order

    def node(self, node: Node) -> int:
        self.out.nodes.append(node)
        return len(self.out.nodes) - 1

    def graph(self, graph: Graph) -> Program:
        for value in (*graph.inputs, *(value for value, _ in graph.constants)):
            if value not in self.at:
                self.at[value] = self.node(
                    Node(Fusing.INPUT, self.b.size(value, self.s.specs.get(value)), (), value, written=True)
                )
                self.out.inputs.append(self.at[value])
        for equation in graph.equations:
            self.equation(equation)
        for k, atom in enumerate(graph.outputs):
            self.out.outputs.append(self.arrive(atom, self.s.outputs.get((graph, k))))
        return self.out

    def arrive(self, atom: Atom, spec: Spec | None) -> int:
        """The node that holds an operand in the spec it is needed in; -1 for a literal."""
        if not isinstance(atom, Value):
            return -1
        have = self.s.specs.get(atom)
        now = self.at[atom]
        if spec is None or have is None or spec == have:
            return now
        if (atom, spec) not in self.moved:
            if self.b.cpu and atom in self.invariant:
                around, source = self.invariant[atom]
                self.hoisted.append(around.moves(atom, source, have, spec))
                now = self.node(Node(Fusing.INPUT, self.b.size(atom, spec), (), atom, written=True))
                self.out.inputs.append(now)
            else:
                now = self.moves(atom, now, have, spec)
            self.moved[atom, spec] = now
        return self.moved[atom, spec]

    def moves(self, value: Value, now: int, source: Spec, target: Spec) -> int:
        """A resharding with what it goes through. XLA:CPU does those of a loop's constants before the loop."""
        for stop in self.s.route(value, source, target):
            now = self.move(value, now, source, stop)
            source = stop
        return now

    def loop(self, nbytes: int, operand: int) -> int:
        """A copy in another layout; joins the loop that makes or reads it."""
        return self.node(Node(Fusing.LOOP, nbytes, (operand,), None, (False,), (False,)))

    def alone(self, nbytes: int, *operands: int) -> int:
        return self.node(Node(Fusing.ALONE, nbytes, operands, written=True))

    def collective(self, nbytes: int, operand: int) -> int:
        return self.node(Node(Fusing.ALONE, nbytes, (operand,), collective=True, written=True))

    def move(self, value: Value, now: int, source: Spec, target: Spec) -> int:
        """One resharding: gathers, exchanges and slices as the partitioner writes them."""
        before, after = self.b.size(value, source), self.b.size(value, target)
        gathered = tuple(len(set(a) - set(b)) > 0 for a, b in zip(source, target, strict=True))
        split = tuple(len(set(b) - set(a)) > 0 for a, b in zip(source, target, strict=True))
        if not any(gathered):
            if any(split):
                return self.node(Node(Fusing.LOOP, after, (now,), None, (False,), (False,)))
            return self.collective(after, now)
        if any(split):
            packed = self.loop(before, now)
            return self.loop(after, self.collective(after, packed))
        shape = local_shape(value.shape, source, self.s.sizes)
        first = gathered.index(True)
        if not self.b.cpu or all(n == 1 for n in shape[:first]):
            return self.collective(after, now)
        # XLA:CPU gathers along the major dimension only: other layouts before and after.
        return self.loop(after, self.collective(after, self.loop(before, now)))

    def equation(self, equation: Equation) -> None:
        name = equation.name
        wanted = self.s.operands
        operands = [self.arrive(atom, wanted.get((equation, k))) for k, atom in enumerate(equation.inputs)]
        if isinstance(equation, Apply) and equation.graphs:
            self.control(equation, operands)
            return
        kind = fusion_class(equation)
        if kind is FusionClass.ALIAS or name == "optimization_barrier":
            for k, value in enumerate(equation.outputs):
                source = operands[k] if k < len(operands) else -1
                self.at[value] = source if source >= 0 else self.node(Node(Fusing.LOOP, 0, ()))
            return
        refs = tuple(ref for ref in operands if ref >= 0)
        atoms = [atom for atom, ref in zip(equation.inputs, operands, strict=True) if ref >= 0]
        if name in RANDOM and self.cpu_random(equation, refs):
            return
        if name == "dot_general":
            refs = self.product_operands(equation, refs)
        if name == "pallas_call" and self.b.cpu:
            starts = [self.alone(self.b.size(value, self.s.specs.get(value))) for value in equation.outputs]
            self.results(equation, (*refs, *starts), (), starts)
            return
        if name == "select_and_scatter_add" and self.b.cpu:
            self.select_and_scatter(equation, refs)
            return
        if name in LAPACK:
            refs = (self.alone(self.out.nodes[refs[0]].nbytes, refs[0]), *refs[1:])
        made: list[int] = []
        partial = self.s.partial.get(equation)
        many = len(equation.outputs) > 1
        parent = -1
        fusing = _fusing(name, kind, self.b.cpu)
        if name == "dot_general" and _outer(equation):
            fusing = Fusing.LOOP
        if many and fusing is not Fusing.LOOP:
            total = sum(self.b.size(v, self.s.specs.get(v)) for v in equation.outputs)
            parent = self.node(Node(Fusing.ALONE, 0, refs, None, written=True, scratch=_scratch(name, total)))
        for value in equation.outputs:
            spec = self.s.specs.get(value)
            raw = spec
            if partial and spec is not None:
                raw = tuple(tuple(a for a in axes if a not in partial) for axes in spec)
            nbytes = self.b.size(value, raw)
            if parent >= 0:
                part = Node(Fusing.PART, nbytes, (parent,), value, written=True)
                if name in LAPACK and value is equation.outputs[0] and nbytes == self.out.nodes[refs[0]].nbytes:
                    part.operands, part.in_place = (parent, refs[0]), 1
                ref = self.node(part)
            else:
                same = tuple(
                    kind is FusionClass.LOOP and name not in _MOVING and atom.shape == value.shape for atom in atoms
                )
                reuses = tuple(name in _REUSING or kind is FusionClass.ALONE for _ in atoms)
                node = Node(fusing, nbytes, refs, value, same, reuses, name in _EXPENSIVE, (), _scratch(name, nbytes))
                if name in SCATTERS or name in ("dynamic_update_slice", "sort"):
                    node.in_place = 0
                    if name in SCATTERS:
                        node.fusing = Fusing.ALONE
                node.written = node.fusing is Fusing.ALONE
                if self.b.cpu and node.fusing is Fusing.REDUCE and self.windowed(equation):
                    node.fusing, node.written = Fusing.ALONE, True
                node.solid = name == "concatenate" and equation_dimension(equation) == len(value.shape) - 1
                if self.b.written is not None and node.fusing is not Fusing.ALONE:
                    node.written = self.b.written(value)
                node.elements = nbytes // value.dtype.itemsize if value.dtype.itemsize else 0
                node.work = node.elements * _WORK.get(name, _WORK_OF_OTHERS if name in TRANSCENDENTAL else 0.0)
                if self.b.cpu and name in PRODUCTS and _narrow(value):
                    wide = self.widened(refs) if name == "dot_general" else refs
                    ref = self.node(dataclasses.replace(node, nbytes=2 * nbytes, value=None, operands=wide))
                    node = Node(Fusing.LOOP, nbytes, (ref,), value, (False,), (False,))
                if name == "dot_general" and value.dtype.kind == "c" and not self.b.cpu:
                    node.scratch = CUBLAS_WORKSPACE
                ref = self.node(node)
            if partial is not None:
                ref = self.collective(nbytes if self.b.cpu else self.b.size(value, spec), ref)
                self.out.nodes[ref].sums = True
                self.out.nodes[ref].in_place = -1 if self.b.cpu else 0
                if raw != spec and self.b.cpu:
                    ref = self.node(Node(Fusing.LOOP, self.b.size(value, spec), (ref,), None, (False,), (False,)))
            made.append(ref)
        for value, ref in zip(equation.outputs, made, strict=True):
            self.at[value] = ref
        if name == "transpose" and isinstance(equation, Apply) and refs:
            self.turned[equation.outputs[0]] = (made[0], refs[0], tuple(equation.params["permutation"]))

    def widened(self, refs: tuple[int, ...]) -> tuple[int, ...]:
        """Operands in single precision, made once for all matrix products that read them."""
        for ref in refs:
            if ref not in self.wide:
                self.wide[ref] = self.node(
                    Node(Fusing.LOOP, 2 * self.out.nodes[ref].nbytes, (ref,), None, (False,), (False,), solid=True)
                )
        return tuple(self.wide[ref] for ref in refs)

    def windowed(self, equation: Equation) -> bool:
        """Whether a reduction goes through a reduce-window."""
        assert isinstance(equation, Apply)
        atom = equation.inputs[0]
        spec = self.s.operands.get((equation, 0))
        shape = atom.shape if spec is None else local_shape(atom.shape, spec, self.s.sizes)
        axes: Sequence[int] = equation.params.get("axes", equation.params.get("dimensions", ()))
        return any(shape[d] > TREE_WINDOW for d in axes)

    def select_and_scatter(self, equation: Equation, refs: tuple[int, ...]) -> None:
        """Gradient of a maximum over windows: an index array for each dimension, then a scatter."""
        source, operand = (self.out.nodes[ref].nbytes for ref in refs[:2])
        value = equation.outputs[0]
        indices = [self.alone(operand) for _ in value.shape]
        call = self.alone(0, refs[1], *indices)
        parts = [self.node(Node(Fusing.PART, source, (call,), written=True)) for _ in value.shape]
        self.at[value] = self.node(Node(Fusing.ALONE, operand, (refs[0], *parts), value, written=True))

    def cpu_random(self, equation: Equation, refs: tuple[int, ...]) -> bool:
        """On a CPU random bits stay two halves, which every reader combines for itself; whether this was done."""
        if not self.b.cpu or len(equation.outputs) != 1:
            return False
        value = equation.outputs[0]
        nbytes = self.b.size(value, self.s.specs.get(value))
        call = self.node(Node(Fusing.ALONE, 0, refs, None, written=True, scratch=RANDOM_WORDS * nbytes))
        halves = [self.node(Node(Fusing.PART, nbytes, (call,), value, written=True)) for _ in range(2)]
        same = (True, True)
        self.at[value] = self.node(Node(Fusing.LOOP, nbytes, tuple(halves), value, same, (False, False)))
        return True

    def product_operands(self, equation: Equation, refs: tuple[int, ...]) -> tuple[int, ...]:
        """Copies operands whose dimensions are not batch, then free and contracted in one block each.

        A transpose right before is read through where what it reads is in such an order.
        """
        assert isinstance(equation, Apply)
        found = list(refs)
        if len(refs) != 2:
            return refs
        numbers: tuple[tuple[Sequence[int], ...], tuple[Sequence[int], ...]] = equation.params["dimension_numbers"]
        contracts, batches = numbers
        for k, (contract, batch) in enumerate(zip(contracts, batches, strict=True)):
            atom, ref = equation.inputs[k], refs[k]
            source, order = ref, tuple(range(len(atom.shape)))
            if isinstance(atom, Value) and atom in self.turned and self.turned[atom][0] == ref:
                _, source, order = self.turned[atom]
            shape = [0] * len(order)
            for d, at in enumerate(order):
                shape[at] = atom.shape[d]
            if _in_blocks(shape, [order[d] for d in contract], [order[d] for d in batch]):
                found[k] = source
            elif not _in_blocks(atom.shape, contract, batch):
                found[k] = self.loop(self.out.nodes[ref].nbytes, ref)
                self.out.nodes[found[k]].value = atom if isinstance(atom, Value) else None
        return tuple(found)

    def control(self, equation: Apply, operands: list[int]) -> None:
        match equation.name:
            case "scan":
                self.scan(equation, operands)
            case "while":
                self.loop_while(equation, operands)
            case "cond":
                bodies = tuple(_Scope(self.b).graph(g) for g in equation.graphs)
                self.results(equation, tuple(r for r in operands if r >= 0), bodies, [])
            case _:
                bodies = tuple(_Scope(self.b).graph(g) for g in equation.graphs)
                self.results(equation, tuple(r for r in operands if r >= 0), bodies, [])

    def scan(self, equation: Apply, operands: list[int]) -> None:
        """Scanned operands are sliced inside the loop, stacked results written in place slice by slice."""
        (graph,) = equation.graphs
        consts, carry = jax_compat.scan_layout(equation.params)
        scope = _Scope(self.b)
        scope.take(self, graph.inputs[:consts], operands)
        for value in graph.inputs[consts + carry :]:
            size = self.b.size(value, self.s.specs.get(value))
            scope.at[value] = scope.node(Node(Fusing.LOOP, size, (), value))
        body = scope.graph(graph)
        starts = operands[consts : consts + carry]
        if self.b.cpu:
            stacked = equation.outputs[carry:]
            starts += [self.alone(self.b.size(value, self.s.specs.get(value))) for value in stacked]
        for k, out in enumerate(body.outputs):
            if out < 0:
                continue
            if k < carry:
                body.carried.append((scope.at[graph.inputs[consts + k]], out))
            else:
                body.outputs[k] = scope.node(Node(Fusing.LOOP, 0, (out,), None, (False,), (False,)))
        self.results(
            equation, tuple(r for r in (*operands, *scope.hoisted, *starts[carry:]) if r >= 0), (body,), starts
        )

    def loop_while(self, equation: Apply, operands: list[int]) -> None:
        n, m = int(equation.params["cond_nconsts"]), int(equation.params["body_nconsts"])
        scope = _Scope(self.b)
        scope.take(self, equation.graphs[1].inputs[:m], operands[n:])
        bodies = (_Scope(self.b).graph(equation.graphs[0]), scope.graph(equation.graphs[1]))
        for k, out in enumerate(bodies[1].outputs):
            if out >= 0:
                bodies[1].carried.append((bodies[1].inputs[m + k], out))
        self.results(equation, tuple(r for r in (*operands, *scope.hoisted) if r >= 0), bodies, operands[n + m :])

    def take(self, around: _Scope, constants: Sequence[Value], operands: Sequence[int]) -> None:
        """Notes a loop's constants, by where they come from in the computation around it."""
        self.invariant = {value: (around, ref) for value, ref in zip(constants, operands, strict=False) if ref >= 0}

    def results(
        self, equation: Equation, refs: tuple[int, ...], bodies: tuple[Program, ...], starts: Sequence[int]
    ) -> None:
        """The control flow, and a part for each result; a carry takes over its start's buffer if that dies here."""
        parent = self.node(Node(Fusing.ALONE, 0, refs, None, bodies=bodies, written=True))
        for k, value in enumerate(equation.outputs):
            start = starts[k] if k < len(starts) else -1
            nbytes = self.b.size(value, self.s.specs.get(value))
            part = Node(Fusing.PART, nbytes, (parent, start) if start >= 0 else (parent,), value, written=True)
            part.in_place = 1 if start >= 0 else -1
            self.at[value] = self.node(part)


def _outer(equation: Equation) -> bool:
    """Whether a product sums nothing: XLA makes it a multiplication of broadcasts."""
    assert isinstance(equation, Apply)
    numbers: tuple[tuple[Sequence[int], ...], tuple[Sequence[int], ...]] = equation.params["dimension_numbers"]
    (contract, _), _ = numbers
    return all(equation.inputs[0].shape[d] == 1 for d in contract)


def _narrow(value: Value) -> bool:
    """Whether XLA:CPU multiplies it in single precision and converts."""
    return value.dtype.itemsize == 2 and jnp.issubdtype(value.dtype, jnp.floating)


def _in_blocks(shape: Sequence[int], contract: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether dimensions are batch first, then free and contracted, or contracted and free, in one block each."""
    free = [d for d in range(len(shape)) if d not in contract and d not in batch]
    real = [d for d in range(len(shape)) if shape[d] > 1]
    orders = ([*batch, *free, *contract], [*batch, *contract, *free])
    return any([d for d in order if d in real] == real for order in orders)


def equation_dimension(equation: Equation) -> int:
    """The dimension that a concatenation joins along."""
    assert isinstance(equation, Apply)
    return int(equation.params["dimension"])


def _fusing(name: str, kind: FusionClass, cpu: bool) -> Fusing:
    if kind is FusionClass.LOOP:
        return Fusing.LOOP
    if kind is FusionClass.ROOT and (name in REDUCTIONS or not cpu) and name not in ("argmax", "argmin"):
        return Fusing.REDUCE
    return Fusing.ALONE


def _scratch(name: str, nbytes: int) -> int:
    return RANDOM_WORDS * nbytes if name in RANDOM else 0
