"""The demo: a small GPT learns Python's standard library on 8 virtual CPU devices, planned by autoshard.

    documents   the standard library's source, cut between top-level definitions
    model       byte-level GPT in Flax NNX: dropout, tied embeddings, bfloat16 compute, float32 parameters
    step        masked cross-entropy, clipping by global norm, AdamW, warm-up and cosine

The step is written for one device and says nothing about sharding. The demo plans it, trains it, repeats the
first steps with plain `jax.jit` on one device, and fails if the losses differ or do not fall.
"""
# Flax and optax are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import sysconfig
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autoshard import autoshard
from autoshard.errors import ArgumentError, explain

VOCABULARY = 256
"""One token a byte."""

DOCUMENT_BREAK = b"\n\n\n"
"""Two empty lines, which Python's style puts between top-level definitions."""

SHORTEST_DOCUMENT = 32
"""Bytes; shorter ones are left out."""

CORPUS_BYTES = 2_000_000

TOLERANCE = 1e-3
"""Largest relative difference of a loss over the first 20 steps. Measured between one device and 8 hand-sharded ones:
1.1e-4 data parallel, 6e-5 two by four with tensor parallel, from the order of bfloat16 sums. Mistakes are well above:
1.6e-2 where shards' means are averaged without their masks, 8e-3 without dropout, 1.2e-2 without clipping."""

LOSS_SHARE = 0.75
"""The mean of the last ten losses must be below this share of the first; after 80 steps it is near 0.54."""

INITIALIZER = nnx.initializers.normal(0.02)

Batch = dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of the model and its training.

    Attributes:
      layers: number of blocks.
      width: of the residual stream; divisible by `heads`.
      heads: attention heads.
      context: tokens a sequence.
      dropout: probability.
      compute: dtype of activations; parameters are float32.
      batch: sequences a step.
      warmup: steps until the peak learning rate.
      decay: steps until the end of the cosine.
      learning_rate: at the peak.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.1
    compute: Any = jnp.bfloat16
    batch: int = 16
    warmup: int = 20
    decay: int = 400
    learning_rate: float = 3e-3


CONFIG = GPTConfig()


@final
class Block(nnx.Module):
    """Causal self-attention and a perceptron, both residual, both normalised before."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        width, compute = config.width, config.compute
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, dtype=compute, rngs=rngs)
        self.queries_keys_values = nnx.Linear(width, 3 * width, dtype=compute, rngs=rngs)
        self.projection = nnx.Linear(width, width, dtype=compute, rngs=rngs)
        self.perceptron_norm = nnx.LayerNorm(width, dtype=compute, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=compute, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=compute, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "batch context width"]) -> Float[Array, "batch context width"]:
        x = x + self.dropout(self.projection(self.attend(self.attention_norm(x))))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.perceptron_norm(x)))))

    def attend(self, x: Float[Array, "batch context width"]) -> Float[Array, "batch context width"]:
        """Causal attention; scores and softmax in float32."""
        batch, context, width = x.shape
        heads = self.queries_keys_values(x).reshape(batch, context, 3 * self.heads, width // self.heads)
        queries, keys, values = jnp.split(heads, 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys, preferred_element_type=jnp.float32)
        scores = scores / math.sqrt(width // self.heads)
        causal = jnp.tril(jnp.ones((1, 1, context, context), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, context, width)


@final
class GPT(nnx.Module):
    """A decoder-only transformer over bytes; the output layer is the embedding, transposed."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": config.compute, "embedding_init": INITIALIZER, "rngs": rngs}
        self.tokens = nnx.Embed(VOCABULARY, config.width, **options)
        self.positions = nnx.Embed(config.context, config.width, **options)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, dtype=config.compute, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch context"]) -> Float[Array, "batch context vocabulary"]:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None, :])
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


@functools.cache
def transformation(config: GPTConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW under warm-up and cosine. One object a configuration."""
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup, config.decay)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))


def make_model(key: jax.Array, config: GPTConfig = CONFIG) -> GPT:
    """The model at its random start."""
    return GPT(config, nnx.Rngs(key))


def make_optimizer(model: GPT, config: GPTConfig = CONFIG) -> nnx.Optimizer[GPT]:
    """The optimizer of the model's parameters."""
    return nnx.Optimizer(model, transformation(config), wrt=nnx.Param)


def make_state(key: jax.Array, config: GPTConfig = CONFIG) -> tuple[GPT, nnx.Optimizer[GPT]]:
    """Model and optimizer."""
    model = make_model(key, config)
    return model, make_optimizer(model, config)


def masked_loss(model: GPT, batch: Batch) -> Float[Array, ""]:
    """Mean cross-entropy in nats over the targets that count."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def train_step(model: GPT, optimizer: nnx.Optimizer[GPT], batch: Batch) -> dict[str, jax.Array]:
    """One step, written for one device: updates model and optimizer in place, returns the loss."""
    loss, gradients = nnx.value_and_grad(masked_loss)(model, batch)
    optimizer.update(model, gradients)
    return {"loss": loss}


def documents(limit: int = CORPUS_BYTES) -> list[np.ndarray]:
    """The standard library's top-level definitions as bytes, in a fixed order.

    Args:
      limit: bytes to read, about.

    Raises:
      ArgumentError: this Python comes without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[np.ndarray] = []
    total = 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            continue
        for text in path.read_bytes().split(DOCUMENT_BREAK):
            if len(text) >= SHORTEST_DOCUMENT:
                found.append(np.frombuffer(text, np.uint8))
                total += len(text)
        if total >= limit:
            return found
    if total < limit // 20:
        raise ArgumentError(
            explain(f"{root} has {total} bytes of Python source", "the standard library", "use a Python that has it")
        )
    return found


def batches(seed: int, config: GPTConfig = CONFIG, limit: int = CORPUS_BYTES) -> Iterator[Batch]:
    """Endless batches, the same for the same seed.

    Args:
      seed: of the numpy generator.
      config: sizes.
      limit: bytes of source to draw from.

    Yields:
      tokens and targets, int32[batch, context], and mask, float32[batch, context]: 0 after a document's end.
    """
    generator = np.random.default_rng(seed)
    corpus = documents(limit)
    context = config.context
    while True:
        window = np.zeros((config.batch, context + 1), np.int32)
        mask = np.zeros((config.batch, context), np.float32)
        # Each document is as likely as any other, so that short ones, and with them padding, are common.
        for row, chosen in enumerate(generator.integers(0, len(corpus), config.batch)):
            start = generator.integers(0, max(1, len(corpus[chosen]) - context // 2))
            text = corpus[chosen][start : start + context + 1]
            window[row, : len(text)] = text
            mask[row, : len(text) - 1] = 1.0
        yield {"tokens": window[:, :-1], "targets": window[:, 1:], "mask": mask}


def run_demo(
    console: Console,
    *,
    steps: int = 80,
    compare: int = 20,
    seed: int = 0,
    config: GPTConfig = CONFIG,
    devices: Any = "auto",
    **options: Any,
) -> bool:
    """Plans, trains, compares, and prints all of it.

    Args:
      console: where to.
      steps: to train.
      compare: of these, how many to repeat on one device.
      seed: of the parameters, the dropout and the data.
      config: sizes.
      devices: as for `autoshard`.
      **options: others of `autoshard`.

    Returns:
      Whether the losses agree and fall.

    Raises:
      ArgumentError: `compare` is above `steps`.
    """
    if not 0 < compare <= steps:
        raise ArgumentError(
            explain(f"compare={compare}, steps={steps}", "1 <= compare <= steps", "train more or compare less")
        )
    here = jax.devices()
    console.print(f"[bold]autoshard demo[/bold]: a byte-level GPT on {len(here)} {here[0].platform} devices")
    step = autoshard(devices=devices, **options)(train_step)
    key = jax.random.key(seed)
    source = batches(seed, config)
    data = [next(source) for _ in range(steps)]
    tokens = sum(int(batch["mask"].sum()) for batch in data)
    with _timed(console, "planning"):
        plan = step.plan(*nnx.eval_shape(functools.partial(make_state, config=config), key), data[0])
    console.print(str(plan), markup=False, highlight=False)
    with _timed(console, "building the state, sharded"):
        model, optimizer = step.init(functools.partial(make_state, config=config), key)
    sharded = _train(console, "sharded", step, model, optimizer, data)

    plain_step: Any = nnx.jit(train_step)
    with jax.default_device(here[0]):
        model, optimizer = make_state(key, config)
        plain = _train(console, "plain jax.jit, one device", plain_step, model, optimizer, data[:compare])
    return _report(console, plain, sharded, tokens)


@contextlib.contextmanager
def _timed(console: Console, what: str) -> Generator[None]:
    """A spinner while something runs, then a line with the time it took."""
    start_s = time.perf_counter()
    with console.status(f"{what} …"):
        yield
    console.print(f"{what}: {time.perf_counter() - start_s:.1f} s", highlight=False)


def _train(console: Console, name: str, step: Any, model: Any, optimizer: Any, data: Sequence[Batch]) -> list[float]:
    """Losses of the steps; the first, which compiles, is timed by itself."""
    losses: list[float] = []
    with _timed(console, f"{name}: compiling and first step"):
        losses.append(float(step(model, optimizer, data[0])["loss"]))
    start_s = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as progress:
        task = progress.add_task(name, total=len(data), completed=1, loss=losses[0])
        for batch in data[1:]:
            losses.append(float(step(model, optimizer, batch)["loss"]))
            progress.update(task, advance=1, loss=losses[-1])
    each_s = (time.perf_counter() - start_s) / max(1, len(data) - 1)
    console.print(f"{name}: {each_s:.3f} s a step", highlight=False)
    return losses


def _report(console: Console, plain: Sequence[float], sharded: Sequence[float], tokens: int) -> bool:
    """The table of both losses, and the verdict."""
    table = Table(title="the same function: loss on one device and sharded")
    for heading in ("step", "plain", "sharded", "relative difference"):
        table.add_column(heading, justify="right")
    differences: list[float] = []
    for number, (expected, given) in enumerate(zip(plain, sharded[: len(plain)], strict=True), 1):
        difference = abs(given - expected) / abs(expected)
        differences.append(difference)
        table.add_row(str(number), f"{expected:.6f}", f"{given:.6f}", f"{difference:.1e}")
    console.print(table)
    worst = float(np.max(differences))  # NaN if one of them is, and then not small
    agree = worst <= TOLERANCE
    _verdict(console, agree, f"largest relative difference {worst:.1e} (allowed {TOLERANCE:.0e})")
    last = float(np.mean(sharded[-10:]))
    fell = last < LOSS_SHARE * sharded[0]
    line = f"loss {sharded[0]:.3f} to {last:.3f} in {len(sharded)} steps on {tokens:,} bytes"
    _verdict(console, fell, f"{line} (limit {LOSS_SHARE * sharded[0]:.3f})")
    return agree and fell


def _verdict(console: Console, good: bool, line: str) -> None:
    console.print(f"[green]ok[/green]      {line}" if good else f"[red]FAILED[/red]  {line}", highlight=False)


def main() -> int:
    """The demo on 8 virtual CPU devices; 0 if the losses agree and fall.

    Must run before JAX's first use.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    return 0 if run_demo(Console()) else 1


if __name__ == "__main__":
    sys.exit(main())
