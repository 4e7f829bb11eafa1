"""Worker of the samplers' benchmark: posteriors' SGLD, SGHMC, BAOA and SGNHT in a bare loop, in place.

The chains are rows of one tensor, and the log posterior is their sum, so that one call steps all of them; SGNHT's
thermostat is one number of a state, so its chains are stepped by `torch.vmap`.
"""

from functools import partial
from typing import Any

import posteriors
import torch
from torch import Tensor
from turns import Block, Case, serve


def log_posterior_and_batches(case: Case, arrays: Any, chains: int) -> tuple[Any, Any]:
    """Return the log posterior of chains with its empty extra, and what draws their batches."""
    none = torch.tensor([])
    if case.problem == "Gaussian":
        variances, scale = torch.from_numpy(arrays["variances"]), float(arrays["scale"])

        def of_density(places: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            return -(places.square() / variances / 2 + scale * noise * places).sum(), none

        return of_density, lambda: torch.randn(chains, len(variances))
    inputs, targets = torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"])

    def of_regression(places: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        residuals = (batch[0] @ places[..., None])[..., 0] - batch[1]
        return -residuals.square().sum() * (len(targets) / case.batch) / 2 - places.square().sum() / 2, none

    def batches() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(targets), (chains, case.batch))
        return inputs[chosen], targets[chosen]

    return of_regression, batches


def build(case: Case, log_posterior: Any) -> Any:
    """Return the transform: its h is ours, its α is η/h; BAOAB is its BAOA, with the same exp(-α·h)."""
    h = case.step**0.5
    if case.sampler == "SGLD":
        return posteriors.sgmcmc.sgld.build(log_posterior, lr=case.step)
    makers = {"SGHMC": posteriors.sgmcmc.sghmc, "BAOAB": posteriors.sgmcmc.baoa, "SGNHT": posteriors.sgmcmc.sgnht}
    options = {"xi": case.friction / h} if case.sampler == "SGNHT" else {}
    return makers[case.sampler].build(log_posterior, lr=h, alpha=case.friction / h, **options)


def chains(case: Case, arrays: Any) -> Block:
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    start = torch.from_numpy(arrays["start"])
    log_posterior, batches = log_posterior_and_batches(case, arrays, len(start))
    transform = build(case, log_posterior)
    state: Any
    if case.sampler == "SGNHT":
        state = torch.vmap(transform.init, randomness="different")(start)
        update = torch.vmap(transform.update, randomness="different")
    else:
        state = transform.init(start.clone())
        update = partial(transform.update, inplace=True)

    def block(steps: int, every: int) -> Any:
        nonlocal state
        places = torch.empty(steps // every, *start.shape)
        for step in range(steps):
            state, _ = update(state, batches())
            if (step + 1) % every == 0:
                places[step // every] = state.params
        return places.numpy()

    return block


if __name__ == "__main__":
    serve(["posteriors", "torch"], dict.fromkeys(["SGLD", "SGHMC", "BAOAB", "SGNHT"], chains))
