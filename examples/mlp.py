"""Plain JAX, no library: a perceptron in a dictionary, plain gradient descent.

    python examples/mlp.py

Runs on the devices JAX finds; with a CPU alone, on 8 virtual ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import autoshard

WIDTHS = (64, 256, 256, 10)

Parameters = list[dict[str, jax.Array]]
Batch = dict[str, np.ndarray]


def make_parameters(key: jax.Array) -> Parameters:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        {"weights": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for k, n, m in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def loss_of(parameters: Parameters, batch: Batch) -> jax.Array:
    x = jnp.asarray(batch["x"])
    for layer in parameters[:-1]:
        x = jax.nn.relu(x @ layer["weights"] + layer["bias"])
    logits = x @ parameters[-1]["weights"] + parameters[-1]["bias"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch["y"])[:, None], axis=1)
    return -jnp.mean(chosen)


@autoshard(devices="auto", donate_argnums=0)
def train_step(parameters: Parameters, batch: Batch) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients), loss


def make_batch(generator: np.random.Generator, teacher: np.ndarray) -> Batch:
    x = generator.normal(size=(256, WIDTHS[0])).astype(np.float32)
    return {"x": x, "y": np.argmax(x @ teacher, axis=1).astype(np.int32)}


def main() -> None:
    generator = np.random.default_rng(0)
    teacher = generator.normal(size=(WIDTHS[0], WIDTHS[-1]))
    key = jax.random.key(0)
    print(train_step.plan(jax.eval_shape(make_parameters, key), make_batch(generator, teacher)))
    parameters = train_step.init(make_parameters, key)
    for number in range(1, 201):
        parameters, loss = train_step(parameters, make_batch(generator, teacher))
        if number % 20 == 0:
            print(f"step {number:3d}  loss {float(loss):.3f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
