"""Which class each primitive is in: the lists behind the default rules of `stream_rules.py` and `fusion.py`.

Names are JAX's (0.10 to 0.12, `jax.lax` and the transformations). Lists are closed on purpose: what is in none of
them, and has no rule of its own, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE: Mapping[str, int] = {
    # Operations an element; XLA counts one for each of these (HloCostAnalysis), more where JAX lowers to several.
    **dict.fromkeys(
        _words(
            "abs add add_any and ceil clamp clz complex conj convert_element_type eq eq_to floor ge gt imag "
            "is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not or population_count real "
            "reduce_precision round select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor"
        ),
        1,
    ),
    "div": 1,
    "rem": 1,
    "one_minus_square": 2,
}

TRANSCENDENTAL: Mapping[str, int] = {
    # Transcendentals an element: one, or as many as the series or the composition that JAX and XLA expand it to take,
    # by order of magnitude.
    **dict.fromkeys(
        _words(
            "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 "
            "logistic pow rsqrt sin sinh sqrt tan tanh"
        ),
        1,
    ),
    **dict.fromkeys(_words("bessel_i0e bessel_i1e digamma lgamma"), 4),
    **dict.fromkeys(
        _words("igamma igamma_grad_a igammac polygamma polynomial random_gamma regularized_incomplete_beta zeta"),
        32,
    ),
}

REDUCTIONS = _words("argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")

CUMULATIVE = _words("cumlogsumexp cummax cummin cumprod cumsum")

WINDOWS = _words("reduce_window reduce_window_max reduce_window_min reduce_window_sum")

VIEWS = _words(
    # No bytes move: the result is the operand under another name, shape or mark (device_put is one inside a program).
    "bitcast_convert_type create_linear custom_lin dce_sink device_put from_edtype inspect_sharding "
    "layout_constraint mesh_cast name optimization_barrier pcast pin pbroadcast pbroadcast_dynamic preduced pvary "
    "random_clone random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p reshape reshard "
    "sharding_constraint squeeze stage stop_gradient tie to_edtype unpin vary_unreduced_cast "
    "vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value"
)

NOTHING = _words(
    # No arrays, or arrays without contents: tokens, sizes, checks, indices of a device.
    "after_all axis_index check create_token dim_as_value dimension_size empty empty2 platform_index "
    "shape_assertion unreachable"
)

MOVES = _words(
    # Elements move and nothing is computed.
    "broadcast_in_dim broadcast_to concatenate copy copy_p iota iota_2x32_shape pad relayout rev split "
    "stack tile transpose unstack"
)

RANDOM = _words(
    "philox2x32 philox4x32 random_bits random_fold_in random_seed random_split rng_bit_generator rng_uniform "
    "threefry2x32 threefry4x32"
)

SCATTERS = _words("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub")

COLLECTIVES = _words(
    # The user's own, inside shard_map. What they cost on the wire depends on a mesh that is not in the equation.
    "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start "
    "all_to_all all_to_all_done all_to_all_start pbroadcast_done pbroadcast_start pmax pmin ppermute "
    "ppermute_done ppermute_start precv psend psum psum_done psum_invariant psum_invariant_start psum_start "
    "ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin "
    "unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start"
)

CONTROL_FLOW = frozenset(("scan", "while", "cond"))

CALLBACKS = _words("debug_callback debug_print io_callback pure_callback")

CUSTOM_CALLS = _words(
    # Code that cannot be looked into: bytes only, no operations. Register a rule of its own where that is too little.
    "call_exported cudnn_fusion ffi_call tpu_custom_call triton_kernel_call"
)

CALLS: Mapping[str, tuple[str, ...]] = {
    # Calls that tracing does not inline, and the names of the parameter with the body (JAX renames them).
    "call": ("call_jaxpr",),
    "closed_call": ("call_jaxpr",),
    "composite": ("jaxpr", "call_jaxpr"),
    "core_map": ("jaxpr",),
    "custom_partitioning": ("call",),
    "custom_vmap_call": ("call",),
    "eval_jaxpr": ("call_jaxpr",),
    "linear_call": ("callee",),
    "remat_opt": ("fwd_jaxpr",),
    "run_state": ("jaxpr",),
    "shard_map": ("jaxpr",),
}
