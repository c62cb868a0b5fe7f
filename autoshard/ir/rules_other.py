"""Factor rules of linear algebra, random bits, and everything that cannot be looked into.

eigh                 ([b,i,j])->([b,k,l],[b,m]) need_replication={i,j,k,l,m}
random_bits          ([])->([i,j]) where bits are counters hashed one by one, else need_replication
pallas_call, callbacks, custom calls, shard_map     need_replication of every dimension
"""

from __future__ import annotations

from autoshard import jax_compat
from autoshard.ir.factors import FactorRule
from autoshard.ir.graph import Apply, Atom
from autoshard.ir.rule_builder import FactorBuilder, batched, pointwise, whole
from autoshard.ir.rule_registry import register_rule, words

MATRIX = words(
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd "
    "symmetric_product triangular_solve tridiagonal"
)
"""The last two dimensions of the first operand are a matrix, those before are a batch."""

VECTOR = ("lu_pivots_to_permutation", "tridiagonal_solve")
"""The last dimension of the first operand is a vector."""

OPAQUE = words(
    # Kernels and calls into other libraries.
    "call_exported cudnn_fusion ffi_call mosaic_gpu_p pallas_call tpu_custom_call triton_kernel_call "
    # Python on the host.
    "debug_callback debug_print inspect_sharding io_callback pure_callback "
    # Sizes and checks of dynamic shapes, effects without data.
    "after_all check create_token dce_sink dim_as_value dimension_size platform_index shape_assertion unreachable "
    # Manual regions: how they are split is their own mesh's business.
    "shard_map "
    # Generators whose bits depend on all that was drawn before.
    "random_gamma rng_bit_generator rng_uniform"
)
"""Every dimension stays whole.

Of `shard_map` this means: operands arrive whole and results leave whole on the axes that are planned here; inside,
the region is split by its own manual axes. Callbacks see the whole array, as they do in the undecorated step. A
kernel or custom call that works on parts says so with a rule of its own (`register_rule`), or by
`jax.experimental.custom_partitioning`.
"""


@register_rule(*MATRIX)
def _matrix(equation: Apply) -> FactorRule:
    return batched(equation, len(equation.inputs[0].shape) - 2)


@register_rule(*VECTOR)
def _vector(equation: Apply) -> FactorRule:
    return batched(equation, len(equation.inputs[0].shape) - 1)


for _name in OPAQUE:
    register_rule(_name)(whole)


for _name in (
    "threefry2x32",
    "threefry4x32",
    "philox2x32",
    "philox4x32",
    "random_seed",
    "random_clone",
    "random_fold_in",
):
    register_rule(_name)(pointwise)


def counter_based(key: Atom) -> bool:
    """Whether bits drawn from keys of this type are hashes of their position, so that each device can make its own.

    Threefry is, unless the user turned `jax_threefry_partitionable` off; of other generators we do not assume it.
    """
    return jax_compat.threefry_partitionable() and str(key.dtype) == "key<fry>"


@register_rule("random_wrap", "random_unwrap")
def _keys(equation: Apply) -> FactorRule:
    """Keys one by one; the words of a key stay together."""
    return batched(equation, min(len(atom.shape) for atom in (*equation.inputs, *equation.outputs)))


@register_rule("random_bits", "random_split")
def _draw(equation: Apply) -> FactorRule:
    """`([b])->([b,i,j])`: for each key an array of bits, or of new keys."""
    builder = FactorBuilder(equation)
    out = builder.result()
    rank = len(builder.shapes[0])
    for dim in range(rank):
        builder.factor({0: dim, out: dim})
    if counter_based(equation.inputs[0]):
        for dim in range(rank, len(builder.shapes[out])):
            builder.factor({out: dim})
    return builder.build()
