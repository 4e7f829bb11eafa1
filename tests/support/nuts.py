"""A reference that has nothing in common with the library: NUTS of NumPyro on small networks, in double precision."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Target:
    """The posterior of a tanh network `Sequential(Linear, Tanh, …, Linear)`.

    Attributes:
        sizes: widths of the layers, inputs and outputs included.
        likelihood: "gaussian" or "categorical".
        x: inputs, shape (N, sizes[0]).
        y: targets, shape (N, sizes[-1]), or labels, shape (N,).
        prior_std: scale of all weights and biases.
        noise_std: of the Gaussian likelihood.
        nu: weight of the hyperprior of each layer's scale, see `HierarchicalPrior`; None for a fixed scale.
    """

    sizes: tuple[int, ...]
    likelihood: Literal["gaussian", "categorical"]
    x: Array
    y: Any
    prior_std: float = 1.0
    noise_std: float = 1.0
    nu: float | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by their names in torch."""
        found: dict[str, tuple[int, ...]] = {}
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(self.sizes)):
            found[f"{2 * layer}.weight"] = (outputs, inputs)
            found[f"{2 * layer}.bias"] = (outputs,)
        return found

    def outputs(self, parameters: Any, x: Any) -> Any:
        """Return the network's outputs, in JAX or in NumPy arrays."""
        from jax import numpy as jnp

        layers = len(self.sizes) - 1
        for layer in range(layers):
            x = x @ parameters[f"{2 * layer}.weight"].T + parameters[f"{2 * layer}.bias"]
            if layer < layers - 1:
                x = jnp.tanh(x)
        return x

    def potential(self, state: Any) -> Any:
        """Return U of the parameters, and of `log_variance`, shape (layers,), if the prior is hierarchical.

        Constants are left out.
        """
        import jax
        from jax import numpy as jnp

        out = self.outputs(state, self.x)
        if self.likelihood == "gaussian":
            energy = ((out - self.y) ** 2).sum() / (2 * self.noise_std**2)
        else:
            energy = -jax.nn.log_softmax(out)[jnp.arange(len(self.y)), self.y].sum()
        for layer in range(len(self.sizes) - 1):
            own = [state[f"{2 * layer}.{name}"] for name in ("weight", "bias")]
            squares = sum((p**2).sum() for p in own) / self.prior_std**2
            if self.nu is None:
                energy += squares / 2
                continue
            count, log_variance = sum(p.size for p in own), state["log_variance"][layer]
            energy += (self.nu + 1) * count / 2 * log_variance
            energy += (self.nu * count + squares) / 2 * jnp.exp(-log_variance)
        return energy


def nuts(target: Target, grid: Array, chains: int, warm_up: int, draws: int, depth: int = 9, seed: int = 0) -> Array:
    """Return the network's outputs on a grid for NUTS draws from over-dispersed starts, shape (chains, draws, n, K).

    Args:
        target: the posterior.
        grid: inputs, shape (n, d).
        chains: chains, run at once.
        warm_up: draws that adapt the step size and a diagonal mass.
        draws: draws of each chain.
        depth: largest depth of a trajectory's tree.
        seed: of starts and draws.
    """
    import jax
    from jax import numpy as jnp
    from numpyro import set_host_device_count
    from numpyro.infer import MCMC, NUTS

    set_host_device_count(1)
    with jax.enable_x64(True):
        generator = np.random.default_rng(seed)
        start = {
            name: jnp.asarray(generator.normal(size=(chains, *shape)) / np.sqrt(shape[-1]) * target.prior_std / 2)
            for name, shape in target.shapes().items()
        }
        if target.nu is not None:
            start["log_variance"] = jnp.asarray(generator.normal(size=(chains, len(target.sizes) - 1)) / 2)
        kernel = NUTS(potential_fn=target.potential, max_tree_depth=depth)
        sampler = MCMC(
            kernel,
            num_warmup=warm_up,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized" if chains > 1 else "sequential",
            progress_bar=False,
        )
        first = start if chains > 1 else {name: value[0] for name, value in start.items()}
        sampler.run(jax.random.PRNGKey(seed), init_params=first)
        states = sampler.get_samples(group_by_chain=True)
        outputs = jax.vmap(jax.vmap(lambda state: target.outputs(state, grid)))(states)
        return np.asarray(outputs, np.float64)


def wasserstein(one: Array, other: Array, levels: int = 400) -> Array:
    """Return W₁ between the laws of two sets of draws in each column, from their quantiles.

    Args:
        one: draws, shape (S, n).
        other: draws, shape (T, n).
        levels: quantiles that are compared.

    >>> float(wasserstein(np.zeros((5, 1)), np.ones((7, 1)))[0])
    1.0
    """
    at = (np.arange(levels) + 0.5) / levels
    distance: Array = np.abs(np.quantile(one, at, axis=0) - np.quantile(other, at, axis=0)).mean(0)
    return distance


def distance(one: Array, other: Array, std: Array) -> float:
    """Return the mean over columns of W₁ over the truth's standard deviation."""
    return float((wasserstein(one, other) / std).mean())


def between_chains(draws: Sequence[Array], std: Array) -> float:
    """Return the mean distance between two chains' draws, each of shape (S, n)."""
    return float(np.mean([distance(one, other, std) for one, other in itertools.combinations(draws, 2)]))
