"""Times blackjax's SGLD and contour SGLD on a mixture in the plane, one chain in a scan; prints steps a second."""

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import blackjax
import jax
import jax.numpy as jnp

STEPS, LR = 1_000_000, 0.05
MEANS = jnp.array([[-2.0, 0.0], [2.0, 0.0]])


def log_density(position, _):
    squares = ((position - MEANS) ** 2).sum(-1)
    return jax.nn.logsumexp(-squares / 2) - jnp.log(2.0) - jnp.log(2 * jnp.pi)


def sgld():
    kernel = blackjax.sgld(jax.grad(log_density))

    def step(position, key):
        return kernel.step(key, position, 0.0, LR), position

    return step, jnp.zeros(2)


def contour():
    kernel = blackjax.csgld(
        log_density, jax.grad(log_density), zeta=0.75, num_partitions=50, energy_gap=0.25, min_energy=1.75
    )

    def step(state, key):
        return kernel.step(key, state, 0.0, LR, 0.01), state.position

    return step, kernel.init(jnp.zeros(2))


def main() -> None:
    loops = {}
    for name, make in (("SGLD", sgld), ("CSGLD", contour)):
        step, start = make()
        run = jax.jit(lambda start, keys, step=step: jax.lax.scan(step, start, keys))
        keys = jax.random.split(jax.random.key(0), STEPS)
        jax.block_until_ready(run(start, keys))
        loops[name] = (run, start, keys)
    for line in sys.stdin:  # a line names what to time
        run, start, keys = loops[line.strip()]
        begin = time.perf_counter()
        jax.block_until_ready(run(start, keys))
        print(json.dumps(STEPS / (time.perf_counter() - begin)), flush=True)


main()
