"""Flax Linen with a TrainState: a small convolutional network, dropout, Adam.

python examples/linen_trainstate.py
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from autoshard import autoshard

Batch = dict[str, np.ndarray]
SHAPE = (16, 16, 1)
CLASSES = 4


class Network(nn.Module):
    """Two strided convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3), strides=(2, 2))(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(CLASSES)(x)


NETWORK = Network()
OPTIMIZER = optax.adam(1e-3)


def make_state(key: jax.Array) -> TrainState:
    variables = NETWORK.init(key, jnp.zeros((1, *SHAPE)), train=False)
    return TrainState.create(apply_fn=NETWORK.apply, params=variables["params"], tx=OPTIMIZER)


@autoshard(devices="auto", donate_argnums=0, static_argnames="train")
def train_step(
    state: TrainState, batch: Batch, key: jax.Array, train: bool = True
) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_of(parameters: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        logits = state.apply_fn({"params": parameters}, batch["image"], train=train, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch["label"]))
        return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])

    (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss, "accuracy": accuracy}


def make_batch(generator: np.random.Generator, size: int = 128) -> Batch:
    """Stripes in one of four directions, and noise."""
    label = generator.integers(0, CLASSES, size).astype(np.int32)
    angle = label * np.pi / CLASSES
    y, x = np.mgrid[: SHAPE[0], : SHAPE[1]]
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    image = np.sin(along + generator.uniform(0, 6, (size, 1, 1))) + generator.normal(0, 1, (size, *SHAPE[:2]))
    return {"image": image[..., None].astype(np.float32), "label": label}


def main() -> None:
    generator = np.random.default_rng(0)
    state_key, dropout_key = jax.random.split(jax.random.key(0))
    print(train_step.plan(jax.eval_shape(make_state, state_key), make_batch(generator), dropout_key))
    state = train_step.init(make_state, state_key)
    for number in range(1, 101):
        state, metrics = train_step(state, make_batch(generator), dropout_key)
        if number % 10 == 0:
            print(f"step {number:3d}  loss {float(metrics['loss']):.3f}  accuracy {float(metrics['accuracy']):.2f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
