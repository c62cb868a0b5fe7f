"""Which class each primitive is in: the lists behind the default rules of `stream_rules.py` and `fusion.py`.

Names are JAX's (0.10 to 0.12, `jax.lax` and the transformations). Lists are closed on purpose: what is in none of
them, and has no rule of its own, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

ELEMENTWISE: Mapping[str, int] = {
    # Operations an element; XLA counts one for each of these (HloCostAnalysis), more where JAX lowers to several.
    **dict.fromkeys(
        (
            "abs add add_any and ceil clamp clz complex conj convert_element_type eq eq_to floor ge gt imag "
            "is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not or population_count real "
            "reduce_precision round select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor"
        ).split(),
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
        (
            "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 "
            "logistic pow rsqrt sin sinh sqrt tan tanh"
        ).split(),
        1,
    ),
    **dict.fromkeys("bessel_i0e bessel_i1e digamma lgamma".split(), 4),
    **dict.fromkeys(
        (
            "igamma igamma_grad_a igammac polygamma polynomial random_gamma regularized_incomplete_beta zeta"
        ).split(),
        32,
    ),
}

REDUCTIONS = frozenset(
    (
        "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
    ).split()
)

CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())

WINDOWS = frozenset("reduce_window reduce_window_max reduce_window_min reduce_window_sum".split())

VIEWS = frozenset(
    # No bytes move: the result is the operand under another name, shape or mark.
    (
        "bitcast_convert_type create_linear custom_lin dce_sink eval_jaxpr from_edtype inspect_sharding "
        "layout_constraint mesh_cast name optimization_barrier pcast pin pbroadcast pbroadcast_dynamic preduced pvary "
        "random_clone random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p reshape reshard "
        "sharding_constraint squeeze stage stop_gradient tie to_edtype unpin vary_unreduced_cast "
        "vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value"
    ).split()
)

NOTHING = frozenset(
    # No arrays, or arrays without contents: tokens, sizes, checks, indices of a device.
    (
        "after_all axis_index check create_token dim_as_value dimension_size empty empty2 platform_index "
        "shape_assertion unreachable"
    ).split()
)

MOVES = frozenset(
    # Elements move and nothing is computed.
    (
        "broadcast_in_dim broadcast_to concatenate copy copy_p device_put iota iota_2x32_shape pad relayout rev split "
        "stack tile transpose unstack"
    ).split()
)

RANDOM = frozenset(
    (
        "philox2x32 philox4x32 random_bits random_fold_in random_seed random_split rng_bit_generator rng_uniform "
        "threefry2x32 threefry4x32"
    ).split()
)

SCATTERS = frozenset("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split())

COLLECTIVES = frozenset(
    # The user's own, inside shard_map. What they cost on the wire depends on a mesh that is not in the equation.
    (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start "
        "all_to_all all_to_all_done all_to_all_start pbroadcast_done pbroadcast_start pmax pmin ppermute "
        "ppermute_done ppermute_start precv psend psum psum_done psum_invariant psum_invariant_start psum_start "
        "ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin "
        "unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start"
    ).split()
)

CONTROL_FLOW = frozenset(("scan", "while", "cond"))

CALLBACKS = frozenset("debug_callback debug_print io_callback pure_callback".split())

CUSTOM_CALLS = frozenset(
    # Code that cannot be looked into: bytes only, no operations. Register a rule of its own where that is too little.
    "call_exported cudnn_fusion ffi_call tpu_custom_call triton_kernel_call".split()
)

CALLS: Mapping[str, str] = {
    # Calls that tracing does not inline, and the parameter with the body.
    "composite": "jaxpr",
    "custom_partitioning": "call",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "run_state": "jaxpr",
    "core_map": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "shard_map": "jaxpr",
    "call": "call_jaxpr",
}
