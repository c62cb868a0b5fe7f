"""Mesh shapes to try when the user names none.

All devices in one axis, and every split into two axes (other devices, devices of one group) whose inner axis stays
inside a node; on one node, where links are alike, (a, b) and (b, a) are the same mesh. Up to 8 devices also three axes.
"""

from __future__ import annotations

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, explain
from autoshard.ir import MeshShape

AXES = {1: ("data",), 2: ("data", "model"), 3: ("replica", "data", "model")}
"""Names of mesh axes by number of axes."""


def named_mesh(shape: tuple[int, ...]) -> MeshShape:
    """A mesh shape with our names.

    Raises:
      MeshError: no axes, or a size below 1.
    """
    if not shape or any(n < 1 for n in shape):
        raise MeshError(explain(f"a mesh of shape {shape}", "one or more sizes of at least 1", "correct the shape"))
    names = AXES.get(len(shape)) or tuple(f"axis{i}" for i in range(len(shape)))
    return tuple(zip(names, shape, strict=True))


def candidate_meshes(cluster: Cluster) -> list[MeshShape]:
    """The meshes worth trying on a cluster, simplest first."""
    n = cluster.size
    per_node = min(node.count for node in cluster.nodes)
    one_node = len(cluster.nodes) == 1
    shapes: list[tuple[int, ...]] = [(n,)]
    for inner in range(2, per_node + 1):
        if n % inner == 0 and inner < n and not (one_node and inner * inner > n):
            shapes.append((n // inner, inner))
    return [named_mesh(shape) for shape in shapes]
