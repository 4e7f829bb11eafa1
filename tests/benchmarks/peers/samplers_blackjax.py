"""Worker of the samplers' benchmark: blackjax's SGLD, SGHMC, SGNHT and MCLMC, all chains in a compiled scan."""

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):  # XLA's flags bound its arithmetic, not its dispatch threads
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.mcmc.integrators import isokinetic_velocity_verlet
from turns import INNER_STEPS, Block, Case, serve

Step = Any
"""(key, state) -> state of one chain."""


def gradient_and_batches(case: Case, arrays: Any) -> tuple[Any, Any]:
    """Return a peer's gradient estimator, and what draws a batch from a key."""
    if case.problem == "Gaussian":
        variances, scale = jnp.asarray(arrays["variances"]), float(arrays["scale"])
        # A "batch" is the gradient's noise.
        return lambda x, noise: -(x / variances + scale * noise), lambda key: jax.random.normal(key, variances.shape)
    inputs, targets = jnp.asarray(arrays["inputs"]), jnp.asarray(arrays["targets"])

    def log_likelihood(position: Any, datum: Any) -> jax.Array:
        return -((datum[0] @ position - datum[1]) ** 2) / 2

    def batch(key: Any) -> Any:
        places = jax.random.randint(key, (case.batch,), 0, len(targets))
        return inputs[places], targets[places]

    return blackjax.sgmcmc.gradients.grad_estimator(lambda x: -jnp.sum(x**2) / 2, log_likelihood, len(targets)), batch


def sgld(case: Case, arrays: Any) -> Block:
    gradient, batch = gradient_and_batches(case, arrays)
    kernel = blackjax.sgld(gradient)

    def step(key: Any, position: Any) -> Any:
        of_batch, of_noise = jax.random.split(key)
        return kernel.step(of_noise, position, batch(of_batch), case.step)

    return blocks(case, step, jnp.asarray(arrays["start"]), lambda position: position)


def sghmc(case: Case, arrays: Any) -> Block:
    """Its h is ours, its α is η/h; a kernel draws new momenta, and takes its inner steps with one batch."""
    gradient, batch = gradient_and_batches(case, arrays)
    h = case.step**0.5
    kernel = blackjax.sghmc(gradient, INNER_STEPS, case.friction / h)

    def step(key: Any, position: Any) -> Any:
        of_batch, of_noise = jax.random.split(key)
        return kernel.step(of_noise, position, batch(of_batch), h)

    return blocks(case, step, jnp.asarray(arrays["start"]), lambda position: position, INNER_STEPS)


def sgnht(case: Case, arrays: Any) -> Block:
    """Its h is ours, its α and first ξ are η/h, and our thermal inertia is 1."""
    gradient, batch = gradient_and_batches(case, arrays)
    h = case.step**0.5
    kernel = blackjax.sgnht(gradient, case.friction / h)

    def step(key: Any, state: Any) -> Any:
        of_batch, of_noise = jax.random.split(key)
        return kernel.step(of_noise, state, batch(of_batch), h)

    start = jnp.asarray(arrays["start"])
    keys = jax.random.split(jax.random.key(case.seed + 1), len(start))
    return blocks(case, step, jax.vmap(kernel.init)(start, keys), lambda state: state.position)


def mclmc(case: Case, arrays: Any) -> Block:
    """Its momenta have a length of 1, ours of √d, so its step is h·√d; its L is step/η. One full gradient a step."""
    variances, start = jnp.asarray(arrays["variances"]), jnp.asarray(arrays["start"])
    length = (case.step * start.shape[1]) ** 0.5

    def log_density(x: Any) -> jax.Array:
        return -jnp.sum(x**2 / variances) / 2

    kernel = blackjax.mclmc(log_density, length / case.friction, length, isokinetic_velocity_verlet)
    keys = jax.random.split(jax.random.key(case.seed + 1), len(start))
    return blocks(
        case,
        lambda key, state: kernel.step(key, state)[0],
        jax.vmap(kernel.init)(start, keys),
        lambda state: state.position,
    )


def blocks(case: Case, step: Step, state: Any, place: Any, gradients: int = 1) -> Block:
    """Return what takes steps of all chains, compiled with its loop, and keeps their state.

    Args:
        case: has the seed.
        step: of one chain.
        state: of all chains.
        place: takes the places out of a state.
        gradients: gradients that `step` takes.
    """
    stepped = jax.vmap(step)
    chains = len(place(state))

    def run(state: Any, key: Any, kept: int, every: int) -> Any:
        def one(state: Any, key: Any) -> Any:
            return stepped(jax.random.split(key, chains), state), None

        def several(state: Any, key: Any) -> Any:
            state, _ = jax.lax.scan(one, state, jax.random.split(key, every))
            return state, place(state)

        return jax.lax.scan(several, state, jax.random.split(key, kept))

    compiled = jax.jit(run, static_argnums=(2, 3))
    key = jax.random.key(case.seed)
    state, _ = compiled(state, key, 1, 1)  # a start's numbers are of weak types, with which a block would compile twice

    def block(steps: int, every: int) -> Any:
        nonlocal state, key
        key, own = jax.random.split(key)
        state, places = compiled(state, own, steps // every, every // gradients)
        return np.asarray(jax.block_until_ready(places))

    return block


if __name__ == "__main__":
    serve(["blackjax", "jax"], {"SGLD": sgld, "SGHMC": sghmc, "SGNHT": sgnht, "MCLMC": mclmc})
