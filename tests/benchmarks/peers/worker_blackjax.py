"""Worker: blackjax's SGLD compiled with its loop (`jax.lax.scan`), on one CPU core."""

import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):  # XLA's flags bound its arithmetic, not its dispatch threads
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import LEARNING_RATE, Regression

NUM_DATA, FEATURES, HIDDEN, CLASSES, BATCH, STEP_SIZE = 60_000, 784, 100, 10, 100, 0.01 / 60_000


def scanned(gradient: Any, data: tuple[jax.Array, jax.Array], step_size: float) -> Callable[..., Any]:
    """Return the compiled loop: position, key and batches' indices (T, n) to the last position and the record."""
    kernel = blackjax.sgld(gradient)
    inputs, targets = data

    def run(position: Any, key: jax.Array, indices: jax.Array, record: Callable[[Any], Any]) -> Any:
        def step(position: Any, keyed: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            key, index = keyed
            position = kernel.step(key, position, (inputs[index], targets[index]), step_size)
            return position, record(position)

        return jax.lax.scan(step, position, (jax.random.split(key, len(indices)), indices))

    return jax.jit(run, static_argnums=3)


def log_normal(position: Any) -> jax.Array:
    """Return the log density of the standard normal prior, up to a constant."""
    return -sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position)) / 2


class Classification:
    """The network 784-100-10 on data in the shape of MNIST, as the torch workers have it."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        inputs = jnp.asarray(rng.random((NUM_DATA, FEATURES), dtype=np.float32))
        labels = jnp.asarray(rng.integers(CLASSES, size=NUM_DATA))
        self.rng = rng
        gradient = blackjax.sgmcmc.gradients.grad_estimator(log_normal, self._log_likelihood, NUM_DATA)
        self.run = scanned(gradient, (inputs, labels), STEP_SIZE)
        self.position = {
            "first": jnp.asarray(rng.normal(0, FEATURES**-0.5, (FEATURES, HIDDEN)), jnp.float32),
            "first_bias": jnp.zeros(HIDDEN),
            "last": jnp.asarray(rng.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES)), jnp.float32),
            "last_bias": jnp.zeros(CLASSES),
        }
        self.compiled_steps: set[int] = set()

    @staticmethod
    def _log_likelihood(position: Any, datum: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs, label = datum
        hidden = jax.nn.relu(inputs @ position["first"] + position["first_bias"])
        return jax.nn.log_softmax(hidden @ position["last"] + position["last_bias"])[label]

    def time(self, steps: int) -> float:
        """Return the seconds of a step, the batches' order included, compilation not."""
        if steps not in self.compiled_steps:
            self._scan(steps)
            self.compiled_steps.add(steps)
        start = time.perf_counter()
        self._scan(steps)
        return (time.perf_counter() - start) / steps

    def _scan(self, steps: int) -> None:
        epochs = -(-steps * BATCH // NUM_DATA)
        order = np.concatenate([self.rng.permutation(NUM_DATA) for _ in range(epochs)])
        indices = jnp.asarray(order[: steps * BATCH].reshape(steps, BATCH))
        key = jax.random.key(int(self.rng.integers(2**31)))
        jax.block_until_ready(self.run(self.position, key, indices, _nothing))


def _nothing(position: Any) -> None:
    return None


def _everything(position: Any) -> Any:
    return position


def chain(problem: Regression, steps: int) -> NDArray[np.float32]:
    def log_likelihood(position: Any, datum: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs, target = datum
        return -((inputs @ position - target) ** 2) / 2

    gradient = blackjax.sgmcmc.gradients.grad_estimator(log_normal, log_likelihood, problem.num_data)
    data = (jnp.asarray(problem.inputs), jnp.asarray(problem.targets))
    run = scanned(gradient, data, LEARNING_RATE / problem.num_data)
    indices = jnp.asarray(np.stack(list(problem.batches(steps))))
    _, path = run(jnp.zeros(problem.dimension), jax.random.key(problem.seed), indices, _everything)
    return np.asarray(path)


if __name__ == "__main__":
    Worker(
        packages=["blackjax", "jax"],
        timings={"blackjax SGLD, lax.scan": Timing(Classification().time)},
        chains={"blackjax SGLD": chain},
        notes={"blackjax SGLD, lax.scan": "XLA on one core; over torch's SGD of the same round in another process"},
    ).serve()
