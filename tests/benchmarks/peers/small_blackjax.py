"""Worker of `small_networks`: blackjax's SGLD of a multilayer perceptron or the CNN, all chains in a compiled scan.

Its arguments are a JSON of widths (null for the CNN), chains, batch, lr and steps, and the path of the arrays; it
prints the processor seconds of a step, once compiled.
"""

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import blackjax
import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    case, arrays = json.loads(sys.argv[1]), np.load(sys.argv[2])
    inputs, targets = jnp.asarray(arrays["inputs"]), jnp.asarray(arrays["targets"])
    widths, chains, size = case["widths"], case["chains"], case["batch"]
    of_classes = jnp.issubdtype(targets.dtype, jnp.integer)

    def convolved(image: Any, weight: Any, bias: Any) -> Any:
        return jax.nn.relu(jax.lax.conv(image, weight, (1, 1), "VALID") + bias[:, None, None])

    def output(parameters: Any, row: Any) -> Any:
        if widths is None:
            first, second, (weight, bias) = parameters
            window = (1, 1, 2, 2)
            pooled = jax.lax.reduce_window(convolved(row[None], *first), -jnp.inf, jax.lax.max, window, window, "VALID")
            return convolved(pooled, *second).ravel() @ weight + bias
        for place, (weight, bias) in enumerate(parameters):
            row = row @ weight + bias
            row = jax.nn.relu(row) if place + 1 < len(parameters) else row
        return row

    def log_likelihood(parameters: Any, datum: Any) -> Any:
        found = output(parameters, datum[0])
        if of_classes:
            return jax.nn.log_softmax(found)[datum[1]]
        return -jnp.sum((found - datum[1]) ** 2) / (2 * 0.1**2)

    def log_prior(parameters: Any) -> Any:
        return -sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters)) / 2

    kernel = blackjax.sgld(blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, len(targets)))

    def start(key: Any) -> Any:
        shapes = [((8, 1, 3, 3), 8), ((16, 8, 3, 3), 16), ((16, 10), 10)]  # of weights and biases
        if widths is not None:
            shapes = [((a, b), b) for a, b in pairwise(widths)]
        keys = jax.random.split(key, len(shapes))
        return [(jax.random.normal(k, of) * 0.1, jnp.zeros(b)) for k, (of, b) in zip(keys, shapes, strict=True)]

    def step(state: Any, key: Any) -> Any:
        of_batch, of_noise = jax.random.split(key)
        places = jax.random.randint(of_batch, (size,), 0, len(targets))
        return kernel.step(of_noise, state, (inputs[places], targets[places]), case["lr"] / len(targets)), None

    @jax.jit
    def run(states: Any, key: Any) -> Any:
        keys = jax.random.split(key, (chains, case["steps"]))
        return jax.vmap(lambda state, own: jax.lax.scan(step, state, own)[0])(states, keys)

    states = jax.vmap(start)(jax.random.split(jax.random.key(0), chains))
    times = []
    for turn in range(4):
        begun = time.process_time()
        states = jax.block_until_ready(run(states, jax.random.key(turn)))
        times.append(time.process_time() - begun)
    print(json.dumps({"seconds": min(times[1:]) / case["steps"], "compilation": times[0]}))


if __name__ == "__main__":
    main()
