"""Flax NNX: the demo's GPT, updated in place.

python examples/gpt_nnx.py
"""

from __future__ import annotations

import functools

import jax
from flax import nnx

from autoshard import autoshard
from autoshard.demo import GPT, Batch, GPTConfig, batches, make_state, masked_loss

CONFIG = GPTConfig(layers=2, width=64, context=64)


@autoshard(devices="auto")
def train_step(model: GPT, optimizer: nnx.Optimizer[GPT], batch: Batch) -> jax.Array:
    loss, gradients = nnx.value_and_grad(masked_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    make = functools.partial(make_state, config=CONFIG)
    key = jax.random.key(0)
    source = batches(seed=0, config=CONFIG)
    print(train_step.plan(*nnx.eval_shape(make, key), next(source)))
    model, optimizer = train_step.init(make, key)
    for number in range(1, 101):
        loss = train_step(model, optimizer, next(source))
        if number % 10 == 0:
            print(f"step {number:3d}  loss {float(loss):.3f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
