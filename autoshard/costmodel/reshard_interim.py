import math


def reshard_collectives(shape, src, dst, mesh):
    sz = dict(mesh)
    p = lambda axes: math.prod(sz[a] for a in axes)
    n = math.prod(shape)
    sa = [a for d in src for a in d]
    da = [a for d in dst for a in d]
    if all(d[: len(s)] == s for s, d in zip(src, dst)):
        return []
    lost = tuple(a for a in sa if a not in da)
    moved = tuple(a for d, (s, t) in enumerate(zip(src, dst)) for a in s if a in da and a not in t)
    out = []
    if moved:
        out.append(("all_to_all", n // p([a for a in sa if a not in moved]), moved))
    if lost:
        out.append(("all_gather", n // p([a for a in sa if a not in lost]), lost))
    if not out:
        out.append(("permute", n // p(sa), tuple(sa)))
    return out
