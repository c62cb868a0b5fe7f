"""Factor rules of operators that work element by element, and of those that only rename or mark values.

exp: ([i,j])->([i,j])      add: ([i,j],[i,j])->([i,j])      select_n: ([],[i,j],[i,j])->([i,j])
"""

from __future__ import annotations

from autoshard.ir.factors import FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.rule_builder import FactorBuilder, pairwise, pointwise
from autoshard.ir.rule_registry import register_rule, words

ELEMENTWISE = words(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul "
    "mulhi ne neg nextafter not one_minus_square or polygamma polynomial population_count pow real reciprocal "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta"
)
"""Operands and results of one shape; scalars stand for themselves beside larger operands."""

MARKS = words(
    "copy copy_p custom_lin device_put layout_constraint mesh_cast name optimization_barrier pcast pin preduced pvary "
    "reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint stop_gradient unpin "
    "vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value"
)
"""Each result is the operand of the same number, marked or moved. A user's own sharding constraint is one of these:
the rule says what it does to data; what it asks for is read from its parameters elsewhere."""

for _name in ELEMENTWISE:
    register_rule(_name)(pointwise)
for _name in MARKS:
    register_rule(_name)(pairwise)


@register_rule("tie")
def _tie(equation: Apply) -> FactorRule:
    """The last operand, after the first was computed."""
    builder = FactorBuilder(equation)
    builder.pointwise((0,))
    return builder.pointwise((builder.operands[-1], builder.result())).build()


@register_rule("bitcast_convert_type", "to_edtype", "from_edtype")
def _bitcast(equation: Apply) -> FactorRule:
    """Leading dimensions alike; a last one that only one side has holds the parts of an element and stays whole."""
    builder = FactorBuilder(equation)
    rank = min(len(shape) for shape in builder.shapes)
    alike = [d for d in range(rank) if builder.shapes[0][d] == builder.shapes[1][d]]
    return builder.pointwise(dims=alike).build()
