"""Plans with made-up timelines, for the page: a medium one, one of 1,024 devices, one with hostile names."""

from __future__ import annotations

import dataclasses
import math
import random

from autoshard.ir import Spec
from autoshard.plan import Alternative, Argument, Collective, Memory, Plan, Resharding
from autoshard.timeline import Lane, MemoryCurve, OperatorCost, Span, Timeline
from tests.test_plan import PLAN

COMPUTE = (
    ("dot_general", "matmul", 90e-6),
    ("add", "elementwise", 9e-6),
    ("reduce_sum", "reduce", 14e-6),
    ("transpose", "move", 11e-6),
    ("gather", "gather", 21e-6),
    ("random_bits", "random", 6e-6),
)
TALK = (
    ("all-reduce of gradients", "all_reduce", 120e-6),
    ("all-gather of weights", "all_gather", 60e-6),
    ("reduce-scatter", "reduce_scatter", 70e-6),
)
HOSTILE = (
    "</script><script>document.title='pwned'</script>",
    "<img src=https://evil.example/x onerror=\"document.title='pwned'\">",
    '"><svg onload=alert(1)>&amp;&lt;',
    "<!--<script>",
    "]]>\u2028\u2029\x00\x07",
    "$content ${script} $$ %s {0}",
    "ünï/\U0001f600/\u202eright-to-left",
    "\ud800 half a pair",
    "javascript:alert(1)",
    "",
)


def spans_of(lane: int, count: int, end_s: float, kinds: tuple[tuple[str, str, float], ...], seed: int) -> list[Span]:
    """So many spans that fill a lane up to about `end_s`."""
    source = random.Random(seed)
    made: list[Span] = []
    at = 0.0
    for i in range(count):
        name, kind, size = source.choice(kinds)
        took = size * source.uniform(0.3, 1.9)
        made.append(Span(lane, name, kind, at, at + took, 1 + i % 3, f"/home/me/model.py:{40 + i % 90}"))
        at += took + (size * source.uniform(0, 0.6) if source.random() < 0.3 else 0.0)
    scale = end_s / at
    return [dataclasses.replace(s, start_s=s.start_s * scale, end_s=s.end_s * scale) for s in made]


def curve(devices: str, count: int, end_s: float, floor: int, height: int) -> MemoryCurve:
    """Rises through a forward pass and falls through the backward pass, with steps."""
    points = [
        (end_s * i / count, floor + int(height * math.sin(math.pi * i / count) * (0.93 + 0.07 * (i % 5) / 4)))
        for i in range(count)
    ]
    return MemoryCurve(devices, tuple(points))


def arguments(layers: int, more: int) -> tuple[Argument, ...]:
    """Parameters of a transformer, a batch, and tables of other sizes."""
    shapes: tuple[tuple[str, str, Spec, int], ...] = (
        ("attention/qkv/kernel", "f32[4096,12288]", (("data",), ("model",)), 4 * 4096 * 12288),
        ("attention/out/kernel", "f32[4096,4096]", (("model",), ("data",)), 4 * 4096 * 4096),
        ("mlp/up/kernel", "f32[4096,16384]", (("data",), ("model",)), 4 * 4096 * 16384),
        ("mlp/down/kernel", "f32[16384,4096]", (("model",), ("data",)), 4 * 4096 * 16384),
        ("norm/scale", "f32[4096]", ((),), 4 * 4096),
    )
    made = [
        Argument(f"{group}/layers/{i}/{name}", kind, spec, nbytes, True)
        for group in ("params", "opt/mu", "opt/nu")
        for i in range(layers)
        for name, kind, spec, nbytes in shapes
    ]
    made += [
        Argument(f"tables/{i}", f"f32[{8 * (i + 1)},64]", ((), ("model",)), 2048 * (i + 1), True) for i in range(more)
    ]
    made.append(Argument("batch/tokens", "i32[1024,4096]", (("data",), ()), 4 << 22, False))
    return tuple(made)


def costs() -> tuple[OperatorCost, ...]:
    made = [
        OperatorCost(
            name,
            kind,
            f"/home/me/model.py:{40 + 7 * i}",
            96 - i,
            size * (60 - i) * 3,
            0.0 if kind in dict(TALK_KINDS) else size * 4e14,
            size * 8e11,
        )
        for i in range(24)
        for name, kind, size in ((COMPUTE + TALK)[i % 9],)
    ]
    return tuple(sorted(made, key=lambda c: -c.time_s))


TALK_KINDS = tuple((kind, name) for name, kind, _ in TALK)

ALTERNATIVES = (
    Alternative("search, mesh 64x16", 0.047, 52 << 30, "1.12x the time"),
    Alternative("tensor parallel (Megatron), mesh 128x8", 0.061, 61 << 30, "1.45x the time"),
    Alternative("fully sharded (ZeRO-3), mesh 1024", 0.093, 31 << 30, "2.21x the time"),
    Alternative("data parallel, mesh 1024", 0.039, 310 << 30, "does not fit: needs 310 GiB of 79.11 GiB"),
    Alternative("pipeline, 16 stages", 1.9, 44 << 30, "45x the time"),
    Alternative(
        "tensor parallel (Megatron), mesh 2x512", math.inf, 0, "no legal sharding: 96 heads do not divide by 512"
    ),
)


def medium() -> Plan:
    """Eight devices in two groups, a few hundred spans."""
    end_s = 0.042
    lanes = (
        Lane("compute", "0-3", 0.036),
        Lane("collectives", "0-3", 0.014),
        Lane("compute", "4-7", 0.033),
        Lane("collectives", "4-7", 0.012),
        Lane("NVLink, node 0", "", 0.016),
    )
    spans = [
        s
        for lane, (count, kinds) in enumerate(((150, COMPUTE), (40, TALK), (130, COMPUTE), (36, TALK), (22, TALK)))
        for s in spans_of(lane, count, end_s * (0.99 - 0.02 * lane), kinds, lane)
    ]
    memory = (curve("0-3", 240, end_s, 30 << 30, 27 << 30), curve("4-7", 200, end_s, 28 << 30, 20 << 30))
    return dataclasses.replace(
        PLAN,
        cluster="h100x8",
        inputs=arguments(12, 3),
        outputs=(Argument("loss", "f32[]", (), 4, False),),
        time_s=end_s,
        compute_s=0.036,
        traffic_s=0.014,
        memory=Memory(29 << 30, 1 << 30, 1 << 28, 27 << 30),
        memory_limit=int(79.11 * 2**30),
        collectives=(
            Collective("all_reduce", ("data",), 48, 9 << 30, 0.0082),
            Collective("all_gather", ("model",), 96, 5 << 30, 0.0041),
            Collective("reduce_scatter", ("data", "model"), 24, 2 << 30, 0.0017),
        ),
        reshardings=tuple(
            Resharding(
                f"bf16[64,4096,{512 * i}]",
                f"/home/me/model.py:{60 + i}",
                ((), (), ("model",)),
                (("data",), (), ()),
                ("all_to_all", "all_gather")[: 1 + i % 2],
                1 << (20 + i),
                12,
                4e-4 / i,
            )
            for i in range(1, 7)
        ),
        alternatives=ALTERNATIVES,
        why=(
            "chosen: search, mesh 2x4, 42 ms a step, 33% of it collectives",
            "next best: search, mesh 64x16, 47 ms (1.12x the time)",
            "whole on every device: params/layers/0/norm/scale and 35 more like it f32[4096]",
        ),
        timeline=Timeline(lanes, tuple(spans), memory, costs()),
    )


def large(inputs: int = 5_000, spans: int = 20_000) -> Plan:
    """1,024 devices: thousands of arguments and tens of thousands of spans."""
    end_s = 1.4
    lanes = (Lane("compute", "0-1023", 1.2), Lane("collectives", "0-1023", 0.6), Lane("InfiniBand rail 0", "", 0.5))
    made = [*spans_of(0, spans - 2 * (spans // 4), end_s, COMPUTE, 7), *spans_of(1, spans // 4, end_s, TALK, 8)]
    made += spans_of(2, spans // 4, end_s, TALK, 9)
    args = arguments((inputs - 1000) // 15, 1000)
    extra = tuple(
        Argument(f"other/{'abcdefgh'[i % 8]}{i}/w", "f32[8]", ((),), 32, False) for i in range(inputs - len(args))
    )
    return dataclasses.replace(
        medium(),
        cluster="h100x1024",
        mesh=(("data", 128), ("model", 8)),
        inputs=args + extra,
        timeline=Timeline(lanes, tuple(made), (curve("0-1023", 20_000, end_s, 20 << 30, 45 << 30),), costs() * 40),
        time_s=end_s,
        compute_s=1.2,
        traffic_s=0.6,
    )


def hostile() -> Plan:
    """Every text of the plan tries to be more than a text."""
    spec: Spec = (("</script>",), ())
    return dataclasses.replace(
        PLAN,
        fingerprint=HOSTILE[0],
        cluster=HOSTILE[1],
        mesh=(("</script>", 2), (HOSTILE[1], 4)),
        inputs=tuple(Argument(f"{name}/{i}", name, spec, 64, i % 2 == 0) for i, name in enumerate(HOSTILE)),
        outputs=tuple(Argument(name, name, spec, 64, False) for name in HOSTILE),
        collectives=tuple(Collective(name, (name,), 1, 1, 1e-6) for name in HOSTILE),
        reshardings=tuple(Resharding(name, name, spec, spec, (name,), 1, 1, 1e-6) for name in HOSTILE),
        alternatives=tuple(Alternative(name, 0.01, 1, name) for name in HOSTILE),
        why=HOSTILE,
        solver=HOSTILE[0],
        timeline=Timeline(
            tuple(Lane(name, name, 1e-3) for name in HOSTILE),
            tuple(Span(i, name, name, 0.0, 1e-3, 1, name) for i, name in enumerate(HOSTILE)),
            tuple(MemoryCurve(name, ((0.0, 5), (1e-3, 9))) for name in HOSTILE),
            tuple(OperatorCost(name, name, name, 1, 1e-6, 1.0, 1.0) for name in HOSTILE),
        ),
    )
