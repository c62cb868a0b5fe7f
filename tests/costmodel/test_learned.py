"""Random programs, kernel features, the network, the store, collection and the command line."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from autoshard.cli import app
from autoshard.costmodel import graph_time_s
from autoshard.costmodel.learned import learn
from autoshard.costmodel.learned.access import accesses
from autoshard.costmodel.learned.collect import SAMPLES, collect_samples, good_samples, read_samples, wanted_programs
from autoshard.costmodel.learned.evaluate import (
    KINDS,
    Score,
    bases,
    measured,
    repeat_scores,
    scaled,
    scores,
    shuffled_control,
    wins,
)
from autoshard.costmodel.learned.features import compile_text, hlo_features, make_batch, pack
from autoshard.costmodel.learned.hlo_graph import pack_text, parse_module, unpack_text
from autoshard.costmodel.learned.kernel_features import WIDTH
from autoshard.costmodel.learned.learn import kernel_roofline_s, learn_model, one_core
from autoshard.costmodel.learned.program_steps import make_step
from autoshard.costmodel.learned.programs import Program, structure
from autoshard.costmodel.learned.store import RECORD, load_model
from autoshard.costmodel.learned.train import (
    LearnOptions,
    Sample,
    Split,
    Trained,
    predict,
    split_samples,
    train,
)
from autoshard.costmodel.learned.walk import walk_features
from autoshard.errors import ArgumentError
from autoshard.ir import print_graph, trace, verify

SMALL = LearnOptions(
    width=16, layers=1, epochs=30, patience=30, batch=32, learning_rate=1e-2, seconds=60.0, dropout=0.0, members=1
)


def _softmax(x):
    h = jnp.tanh(x) * 2
    return (jax.nn.softmax(h, axis=-1), h.sum(axis=0))


SOFTMAX_AVALS = (jax.ShapeDtypeStruct((64, 96), jnp.float32),)
SOFTMAX = trace(_softmax, SOFTMAX_AVALS)
SMALL_STEP = 3
"""A seed whose step compiles and runs fast."""


@pytest.fixture(scope="module")
def softmax_text() -> str:
    return compile_text(SOFTMAX)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """A synthetic law: a kernel takes its base time by the exponential of its first figure."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    features = hlo_features(_TEXT)
    for i in range(160):
        n = int(rng.integers(1, 5))
        nodes = np.zeros((n, WIDTH), np.float32)
        nodes[:, :4] = rng.standard_normal((n, 4))
        base = np.exp(rng.uniform(-10, -8, n)).astype(np.float32)
        chain = np.array([(k, k + 1) for k in range(n - 1)], np.int32).reshape(-1, 2)
        each = dataclasses.replace(
            features,
            nodes=nodes,
            base_s=base,
            edges=chain,
            edge_bytes=np.ones(n - 1, np.float32),
            work=np.ones((n, 3)),
            names=tuple(f"k{k}" for k in range(n)),
            runs=np.ones(n),
            keys=np.repeat(i * 10 + np.arange(n)[:, None], 3, axis=1),  # no two alike
        )
        kernel_s = (base * np.exp(1.2 * nodes[:, 0])).astype(np.float64)
        time_s, nan = float(kernel_s.sum()), np.full(n, np.nan)
        sample = Sample(
            name=f"step-{i}",
            family="law",
            structure=f"s{i}",
            features=each,
            time_s=float("nan") if i % 10 == 0 else time_s,
            kernel_s=kernel_s,
            kernel_spread=np.zeros(n),
            analytic_s=float(base.sum()),
            kernel_analytic_s=base,
            again_s=time_s * 1.1,
            kernel_again_s=nan if i % 2 else kernel_s * 1.2,
        )
        made.append(sample)
    return made


_TEXT = """HloModule m

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} add(%a, %a)
}
"""


@pytest.fixture(scope="module")
def trained(samples: list[Sample]) -> tuple[Split, Trained]:
    split = split_samples(samples, 0)
    return split, train(split, SMALL)


def test_programs_are_deterministic_and_valid():
    texts: set[str] = set()
    for seed in range(4):
        program, again = make_step(seed), make_step(seed)
        graph = program.graph()
        verify(graph)
        assert print_graph(graph) == print_graph(again.graph())
        assert program.avals == again.avals
        args = program.arguments()
        assert [(a.shape, a.dtype) for a in args] == [(a.shape, a.dtype) for a in program.avals]
        for a, bound in zip(args, program.bounds, strict=True):
            assert not bound or ((a >= 0).all() and (a < bound).all())
        texts.add(structure(graph))
    assert len(texts) > 1


def test_structure_leaves_out_sizes():
    small = trace(lambda x: (jnp.exp(x),), [jax.ShapeDtypeStruct((4, 4), jnp.float32)])
    large = trace(lambda x: (jnp.exp(x),), [jax.ShapeDtypeStruct((64, 7), jnp.float32)])
    other = trace(lambda x: (jnp.sin(x),), [jax.ShapeDtypeStruct((4, 4), jnp.float32)])
    assert structure(small) == structure(large) != structure(other)


def test_graph_time_counts_trips():
    def loop(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, length=10)
        return (y,)

    def once(x):
        return (jnp.sin(x) @ x,)

    device, avals = one_core(), [jax.ShapeDtypeStruct((128, 128), jnp.float32)]
    ten, one = graph_time_s(trace(loop, avals), device), graph_time_s(trace(once, avals), device)
    assert ten == pytest.approx(10 * one, rel=0.2)


def test_features_are_stable(softmax_text):
    first, second = hlo_features(softmax_text), hlo_features(unpack_text(pack_text(softmax_text)))
    np.testing.assert_array_equal(first.nodes, second.nodes)
    np.testing.assert_array_equal(first.edges, second.edges)
    assert np.isfinite(first.nodes).all()
    assert (first.base_s > 0).all()
    module = parse_module(softmax_text)
    assert len(first.base_s) == len(module.kernels) + 1
    assert first.edges.max() < len(module.kernels)
    assert module.arguments[0].dims == (64, 96)


def test_transposes_that_cancel_are_not_walked():
    def back_and_forth(columns: str) -> str:
        return f"""HloModule m

%fused (p: f32[128,512]) -> f32[128,512] {{
  %p = f32[128,512]{{1,0}} parameter(0)
  %t = f32[512,128]{{1,0}} transpose(%p), dimensions={{1,0}}
  ROOT %u = f32[{columns}]{{1,0}} transpose(%t), dimensions={{{"1,0" if columns == "128,512" else "0,1"}}}
}}

ENTRY %main (a: f32[128,512]) -> f32[{columns}] {{
  %a = f32[128,512]{{1,0}} parameter(0)
  ROOT %b = f32[{columns}]{{1,0}} fusion(%a), kind=kLoop, calls=%fused
}}
"""

    same, turned = (
        walk_features(parse_module(back_and_forth(columns)).kernels[0]) for columns in ("128,512", "512,128")
    )
    assert np.expm1(same[0]) == pytest.approx(4)
    assert np.expm1(turned[0]) == pytest.approx(2048)


def test_operands_from_before_are_far():
    text = """HloModule m

ENTRY %main (a: f32[1000], b: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %c = f32[1000]{0} add(%a, %a)
  %d = f32[1000]{0} multiply(%b, %b)
  ROOT %e = f32[1000]{0} subtract(%c, %d)
}
"""
    *_, last = accesses(parse_module(text))
    assert last.distance[0] > last.distance[1] == 0
    assert last.read == (4000, 4000)


def test_loop_bodies_count_their_trips():
    def loop(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) * 2, None), x, length=50)
        return (y,)

    module = parse_module(compile_text(trace(loop, [jax.ShapeDtypeStruct((5000,), jnp.float32)])))
    assert any(kernel.trips == 50 for kernel in module.kernels)


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ArgumentError, match="no ENTRY"):
        parse_module("nothing")


def test_prediction_does_not_depend_on_padding(trained, samples):
    _, model = trained
    alone = [predict(model, [s.features]) for s in samples[:5]]
    together = predict(model, [s.features for s in samples])
    np.testing.assert_allclose([t.steps[0] for t in alone], together.steps[:5], rtol=1e-4)
    for one, kernels in zip(alone, together.kernels[:5], strict=True):
        np.testing.assert_allclose(one.kernels[0], kernels, rtol=1e-4)


def test_batches_hold_every_program_once():
    sizes = [(n, n) for n in (10, 3000, 5, 1500, 700, 20)]
    assert sorted(i for part in pack(sizes, range(6), 3) for i in part) == list(range(6))
    features = hlo_features(_TEXT)
    batch = make_batch([features, features], 4)
    assert batch.program[:4].tolist() == [0, 0, 1, 1]
    assert (batch.program[4:] == 3).all()


def test_learns_a_law_that_shuffled_labels_do_not_teach(trained):
    split, model = trained
    held = split.held_out
    learned = scores("learned", predict(model, [s.features for s in held]), measured(held))
    base = scores("mean correction", scaled(bases, split.train, held), measured(held))
    control = [s for s in shuffled_control(split, SMALL) if s.model == "shuffled"]
    for mine, mean, shuffled in zip(learned, base, control, strict=True):
        assert mine.median < 0.14 < mean.median
        assert shuffled.median > max(2 * mine.median, 0.7 * mean.median)


def test_repeats_and_units(samples):
    kernels, steps = repeat_scores(samples)
    assert kernels.median == pytest.approx(0.2)
    assert steps.median == pytest.approx(0.1)
    assert steps.count == len(samples) * 9 // 10
    device = one_core()
    roofline = kernel_roofline_s(samples[0].features, device)
    assert (roofline >= device.kernel_launch_s).all()


def test_split_keeps_structures_together(samples):
    twins = [dataclasses.replace(s, structure=f"s{i // 4}") for i, s in enumerate(samples)]
    split = split_samples(twins, 1)
    sides = [{s.structure for s in part} for part in (split.train, split.validation, split.held_out)]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    with pytest.raises(ArgumentError, match="at least 20"):
        split_samples(samples[:5], 0)


def test_wins_only_where_validation_is_better():
    def table(learned: float, analytic: float) -> list[Score]:
        return [
            Score(model, kind, 50, 1 - error, error, error, 1.0)
            for kind in KINDS
            for model, error in (("learned", learned), ("analytic", analytic), ("analytic, scaled", analytic))
        ]

    assert wins(table(0.1, 0.3)) == {"cluster": True, "step": True}
    assert wins(table(0.3, 0.1)) == {"cluster": False, "step": False}
    few = [dataclasses.replace(s, count=3) for s in table(0.1, 0.3)]
    assert wins(few) == {"cluster": False, "step": False}


def test_store_round_trip(tmp_path: Path, samples, softmax_text):
    found = learn_model(samples, tmp_path, dataclasses.replace(SMALL, epochs=2), {}, shuffled=False)
    model = load_model(tmp_path)
    assert model.record["split"]["held_out"]["programs"] == len(found.split.held_out)
    assert model.predict_hlo_s(softmax_text) == model.predict_s(SOFTMAX) > 0
    assert model.wins("step") == found.record["wins"]["step"]
    assert "validation clusters" in model.why("cluster")
    times = model.kernel_times_s(softmax_text)
    assert set(times) == {kernel.name for kernel in parse_module(softmax_text).kernels}
    assert 0 < sum(times.values()) < model.predict_hlo_s(softmax_text)
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps(record | {"layout": "kernels-0:3"}))
    with pytest.raises(ArgumentError, match="layout 'kernels-0:3'"):
        load_model(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(ArgumentError, match="format 99"):
        load_model(tmp_path)
    with pytest.raises(ArgumentError, match="autoshard learn"):
        load_model(tmp_path / "nothing")


@pytest.fixture(scope="module")
def too_few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """What the command line says after measuring one program, and its folder."""
    folder = tmp_path_factory.mktemp("too_few")
    return CliRunner().invoke(app, ["learn", "--programs", "1", "-o", str(folder)]), folder


def test_collection_resumes_and_keeps_the_fastest(tmp_path: Path, too_few: tuple[Result, Path]):
    assert wanted_programs(2, 0) == wanted_programs(9, 0)[:2]
    names = [*wanted_programs(1, 0), SMALL_STEP]
    file = tmp_path / SAMPLES
    file.write_text((too_few[1] / SAMPLES).read_text())
    (first,) = read_samples(file)
    assert "error" not in first
    with file.open("a") as out:
        out.write(f'{{"seed": {SMALL_STEP}')  # cut short by an interrupt
    second = collect_samples(file, names, dict(os.environ))
    assert (second.there, second.measured + second.noisy) == (1, 1)
    records = read_samples(file)
    assert records[0] == first
    assert [r["seed"] for r in records] == names
    modules = [parse_module(unpack_text(r["hlo"])) for r in records]
    for record, module in zip(records, modules, strict=True):
        labelled = [k.name for k in module.kernels if k.name in record["kernels"]]
        assert len(labelled) > 0.9 * len(module.kernels)
    again = [records[0] | {"noisy": False, "time_s": t, "kernels": {"k": [1.0, t, 4.0]}} for t in (3.0, 2.0)]
    (kept,) = good_samples(again)
    assert (kept["time_s"], kept["again_s"]) == (2.0, 3.0)
    assert (kept["kernel_s"], kept["kernel_again_s"], kept["kernel_spread"]) == ({"k": 2.0}, {"k": 3.0}, {"k": 0.5})
    (noisy,) = good_samples([again[0] | {"noisy": True}])
    assert np.isnan(noisy["time_s"])


def test_cli_says_what_is_missing(tmp_path: Path, too_few: tuple[Result, Path]):
    result, _ = too_few
    assert isinstance(result.exception, ArgumentError)
    assert "collect more" in str(result.exception)
    bad = CliRunner().invoke(app, ["learn", "--programs", "0", "-o", str(tmp_path / "m")])
    assert isinstance(bad.exception, ArgumentError)


def test_cli_learns_from_what_is_there(tmp_path: Path, softmax_text, monkeypatch: pytest.MonkeyPatch):
    one = Program(0, "x", _softmax, SOFTMAX_AVALS, (0,))
    monkeypatch.setattr(learn, "make_step", lambda seed: one)  # the program of all rows
    rows = [
        {
            "seed": s,
            "family": "x",
            "structure": f"s{s}",
            "hlo": pack_text(softmax_text),
            "time_s": 1e-4 + s * 1e-6,
            "kernels": {k.name: [1.0, 1e-5, 1e-5] for k in parse_module(softmax_text).kernels},
        }
        for s in wanted_programs(25, 0)
    ]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(r | {"noisy": False, "session": 0}) + "\n" for r in rows))
    command = ["learn", "--programs", "25", "--train-minutes", "0.02", "--members", "1", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "programs never seen" in result.output
    assert "there before 25" in result.output
    assert load_model(tmp_path).record["counts"]["good"] == 25
