"""Factor rules from Shardy itself: of primitives without a rule here, and to test those that have one.

The one equation is lowered to StableHLO, Shardy's pass puts a rule on every operator
(`sdy-populate-op-sharding-rules`), and the rules are composed along the values:

    equation   -->   func.func of a few stablehlo ops, each with #sdy.op_sharding_rule   -->   FactorRule

It is lowered for TPU, where operators stay what they are (CPU and GPU turn many into library calls that Shardy does
not know). Where Shardy is silent (iota, constants, loops) the composition says what is evident; anything else is an
error.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from autoshard import jax_compat
from autoshard.errors import UnknownPrimitiveError, explain
from autoshard.ir.compose import Composer
from autoshard.ir.factors import Dims, FactorKind, FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import shape_of

PLATFORMS = ("tpu", "cpu")
"""Lowered for the first of these that works."""

_MOVES = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.transpose", "sdy.sharding_constraint")

_REDUCERS = {
    "stablehlo.add": "add",
    "stablehlo.multiply": "mul",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
"""How partial results combine, by the one operator in the body of a reduction or scatter."""

_SUMS = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather", "stablehlo.dot")

_FREE = ("stablehlo.constant", "stablehlo.iota", "stablehlo.create_token", "stablehlo.after_all")
"""Made on each device, in any part."""

_PAIRS = ("stablehlo.optimization_barrier",)

_WHOLE = ("stablehlo.rng_bit_generator", "stablehlo.rng")

_RETURNS = ("func.return", "stablehlo.return")


def shardy_rule(equation: Apply, strict: bool = True) -> FactorRule:
    """The rule that Shardy's own rules make for an equation.

    Args:
      equation: not control flow (bodies are not among its parameters).
      strict: see `Composer.rule`.

    Raises:
      UnknownPrimitiveError: the equation cannot be lowered alone, or a part of it has no rule.
    """
    signature = _Signature(
        equation.primitive,
        tuple(sorted(equation.params.items(), key=lambda item: item[0])),
        tuple(atom.aval for atom in (*equation.inputs, *equation.outputs)),
        strict,
        equation,
    )
    try:
        hash(signature)
    except TypeError:
        return _rule_of(signature)
    return _cached(signature)


@final
@dataclass(frozen=True, slots=True)
class _Signature:
    """What a rule depends on; equations that differ only in place share one."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    avals: tuple[Any, ...]
    strict: bool
    equation: Apply = field(compare=False)


def _rule_of(signature: _Signature) -> FactorRule:
    equation = signature.equation
    reasons: list[str] = []
    for platform in PLATFORMS:
        try:
            module = _lower(equation, platform)
            return _Reader(module, equation).rule(signature.strict)
        except _NoRuleError as error:
            reasons.append(f"{platform}: {error}")
        except Exception as error:  # JAX raises anything here, from NotImplementedError to plain asserts.
            reasons.append(f"{platform}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    line = jax_compat.source_line(equation.place.source) if equation.place.source is not None else ""
    raise UnknownPrimitiveError(
        explain(
            f"the primitive '{equation.name}' has no factor rule" + (f" (from {line})" if line else ""),
            "a primitive that autoshard or Shardy has a rule for; tried " + "; ".join(dict.fromkeys(reasons)),
            f"register one with autoshard.ir.register_rule('{equation.name}'), or report the primitive",
        )
    )


_cached = functools.lru_cache(maxsize=4096)(_rule_of)


class _NoRuleError(Exception):
    """A part of the lowered equation that nothing is known about."""


def _lower(equation: Apply, platform: str) -> Any:
    fun = functools.partial(_bind, equation)
    return jax_compat.lower_with_sharding_rules(fun, [atom.aval for atom in equation.inputs], platform)


def _bind(equation: Apply, *args: Any) -> Sequence[Any]:
    with jax_compat.equation_context(equation.place.source, equation.context):
        return jax_compat.bind(equation.primitive, args, dict(equation.params))


@final
class _Reader:
    """Composes the rules of a lowered module; values are keyed by the call they belong to."""

    def __init__(self, module: Any, equation: Apply) -> None:
        self.functions: dict[str, Any] = {op.attributes["sym_name"].value: op for op in module.body.operations}
        self.equation = equation
        self.composer = Composer()
        self.calls = 0

    def rule(self, strict: bool) -> FactorRule:
        """The rule of the public function."""
        block = self.functions["main"].regions[0].blocks[0]
        results = self._block(block, 0)
        operands = [self._key(value, 0) for value in block.arguments]
        atoms = (*self.equation.inputs, *self.equation.outputs)
        if len(operands) + len(results) != len(atoms):
            raise _NoRuleError("the lowered function has other arguments than the primitive")
        ranks = [len(shape_of(atom.aval)) for atom in atoms]
        return self.composer.rule(operands, results, ranks, strict)

    def _key(self, value: Any, call: int) -> Hashable:
        key = (call, value)
        self.composer.declare(key, jax_compat.mlir_shape(value))
        return key

    def _keys(self, values: Iterable[Any], call: int) -> list[Hashable]:
        return [self._key(value, call) for value in values]

    def _block(self, block: Any, call: int) -> list[Hashable]:
        """Reads a block; the keys of what it returns."""
        self._keys(block.arguments, call)
        for op in block.operations:
            if op.operation.name in _RETURNS:
                return self._keys(op.operands, call)
            self._op(op.operation, call)
        return []

    def _op(self, op: Any, call: int) -> None:
        operands, results = self._keys(op.operands, call), self._keys(op.results, call)
        match str(op.name):
            case "func.call":
                self._call(op.attributes["callee"].value, operands, results)
            case "stablehlo.composite":
                self._call(op.attributes["decomposition"].value, operands, results)
            case "stablehlo.while":
                self._while(op, call, operands, results)
            case "stablehlo.case" | "stablehlo.if":
                for region in op.regions:
                    self._link(self._block(region.blocks[0], call), results)
            case name if name in _PAIRS:
                shapes = [jax_compat.mlir_shape(value) for value in op.operands]
                for operand, result, shape in zip(operands, results, shapes, strict=True):
                    self._pointwise([operand], [result], [shape, shape])
            case name if name in _WHOLE:
                for value, shape in zip((*operands, *results), _shapes(op), strict=True):
                    for dim in range(len(shape)):
                        self.composer.keep_whole(value, dim)
            case name if name in _FREE:
                pass
            case name:
                self._ruled(op, name, operands, results)

    def _ruled(self, op: Any, name: str, operands: list[Hashable], results: list[Hashable]) -> None:
        shapes = _shapes(op)
        if not any(max(shape, default=1) > 1 for shape in shapes):
            return
        parsed = jax_compat.sharding_rule_of(op)
        if parsed is not None:
            rule = parse_rule(parsed, _reducer(op, name))
            self.composer.apply(rule, operands, results, name in _MOVES)
            return
        if name.startswith("chlo.") and len({shape for shape in shapes if shape}) == 1:
            self._pointwise(operands, results, shapes)
            return
        if name == "chlo.top_k":
            rank = len(shapes[0])
            dims = tuple((d,) for d in range(rank - 1))
            rule = FactorRule(((*dims, ()),), ((*dims, ()),) * 2, shapes[0][:-1], *_parallel(rank - 1))
            self.composer.apply(rule, operands, results)
            return
        target = op.attributes["call_target_name"].value if name == "stablehlo.custom_call" else ""
        raise _NoRuleError(f"Shardy has no rule for {name}{f' @{target}' if target else ''}")

    def _pointwise(self, operands: list[Hashable], results: list[Hashable], shapes: list[tuple[int, ...]]) -> None:
        """Values of one shape, or scalars."""
        shape = max(shapes, key=len)
        sides: list[Dims] = [tuple((d,) for d in range(len(ranked))) for ranked in shapes]
        count = len(operands)
        rule = FactorRule(tuple(sides[:count]), tuple(sides[count:]), shape, *_parallel(len(shape)))
        self.composer.apply(rule, operands, results)

    def _call(self, name: str, operands: list[Hashable], results: list[Hashable]) -> None:
        self.calls += 1
        call = self.calls
        block = self.functions[name].regions[0].blocks[0]
        self._link(operands, self._keys(block.arguments, call), alias=True)
        self._link(self._block(block, call), results, alias=True)

    def _while(self, op: Any, call: int, operands: list[Hashable], results: list[Hashable]) -> None:
        """Initial values, loop variables and results are split alike."""
        self._link(operands, results)
        for index, region in enumerate(op.regions):
            block = region.blocks[0]
            self._link(results, self._keys(block.arguments, call))
            returned = self._block(block, call)
            if index == 1:
                self._link(returned, results)

    def _link(self, sources: list[Hashable], targets: list[Hashable], alias: bool = False) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.composer.link(source, target, alias)


def _shapes(op: Any) -> list[tuple[int, ...]]:
    return [jax_compat.mlir_shape(value) for value in (*op.operands, *op.results)]


def _parallel(count: int) -> tuple[tuple[FactorKind, ...], tuple[str, ...]]:
    """Kinds and reducers of parallel factors."""
    return (FactorKind.PARALLEL,) * count, ("",) * count


def _reducer(op: Any, name: str) -> str:
    if name in _SUMS:
        return "add"
    if len(op.regions) != 1:
        return ""
    body = [inner.operation.name for inner in op.regions[0].blocks[0].operations]
    return _REDUCERS.get(body[0], "") if len(body) == 2 else ""


def parse_rule(rule: Any, reducer: str) -> FactorRule:
    """A rule of ours from Shardy's attribute (`sdy.OpShardingRuleAttr`)."""
    sizes = tuple(int(n) for n in rule.factor_sizes)
    kinds = [FactorKind.PARALLEL] * len(sizes)
    for kind, factors in (
        (FactorKind.REDUCTION, rule.reduction_factors),
        (FactorKind.PERMUTATION, rule.permutation_factors),
        (FactorKind.NEED_REPLICATION, rule.need_replication_factors),
    ):
        for factor in factors:
            kinds[factor] = kind
    return _clean(
        FactorRule(
            tuple(_dims(mapping) for mapping in rule.operand_mappings),
            tuple(_dims(mapping) for mapping in rule.result_mappings),
            sizes,
            tuple(kinds),
            tuple(reducer if kind is FactorKind.REDUCTION else "" for kind in kinds),
        )
    )


def _dims(mapping: Any) -> Dims:
    return tuple(tuple(int(f) for f in jax_compat.dim_factors(dim)) for dim in jax_compat.tensor_dims(mapping))


def _clean(rule: FactorRule) -> FactorRule:
    """Without factors of size 1; what is parallel in an operand but in no result needs replication.

    Shardy of 2026 and older calls the odd factors of a reshape parallel, for its propagation to stop there.
    """
    made = {f for dims in rule.results for dim in dims for f in dim}
    kinds = tuple(
        FactorKind.NEED_REPLICATION if kind is FactorKind.PARALLEL and f not in made else kind
        for f, kind in enumerate(rule.kinds)
    )

    operands, results = (
        tuple(tuple(tuple(f for f in dim if rule.sizes[f] > 1) for dim in dims) for dims in values)
        for values in (rule.operands, rule.results)
    )
    return FactorRule(operands, results, rule.sizes, kinds, rule.reducers)
