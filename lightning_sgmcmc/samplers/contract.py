"""The contract of `Sampler` as a check, for a sampler of your own."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.tensors import exact

SHAPES: tuple[tuple[int, ...], ...] = ((), (4, 3), (5,), (2,), (3, 3), (1,), (2, 2), (7,))
NUM_DATA, CHAINS, STEPS = 20, 3, 8
DRAWN, CURVATURES = 4000, (0.5, 1.0)
"""Coordinates of each curvature of the mean potential, in the check of the law."""
TOLERATED = 0.1
"""Relative error of a variance: three standard errors of 4,000 draws, √(2/4000) each, leave 3 % (lr·λ/2 is 1 %)."""


def check_contract(make: Callable[..., Sampler], lr: float = 0.02, law: bool = True, steps: int = 1500) -> None:
    """Raise unless a sampler keeps to what the library relies on.

    On the CPU, with small tensors, in about a second:

    1. A sampler that was saved through a file continues bit for bit, from every step.
    2. Each of three stacked chains is, bit for bit, the chain that it is alone.
    3. A step at temperature 0 draws no noise, if the rule makes one; none touches or reads torch's default generator.
    4. On U(θ) = N/2·Σ_i λ_i·θ_i² the draws have variance τ/(N·λ_i), at τ = 1 and at τ = 0.25.

    Args:
        make: the class, or a partial of it with its options.
        lr: step size; the variance's error that it causes should be below 3 %.
        law: whether to check 4, which holds of a rule whose stationary law is exp(-U/τ) at small step sizes.
        steps: steps for 4, at least ten relaxation times (1/(lr·λ) of SGLD).

    Raises:
        AssertionError: with the part of the contract that fails, and the remedy.

    >>> from lightning_sgmcmc.samplers import SGLD
    >>> check_contract(SGLD)
    """
    _check_resume(make, lr)
    _check_chains(make, lr)
    _check_generators(make, lr)
    if law:
        _check_law(make, lr, steps)


def _made(make: Callable[..., Sampler], lr: float, chains: tuple[int, ...]) -> tuple[list[nn.Parameter], Sampler]:
    starts = [[torch.randn(shape, generator=torch.Generator().manual_seed(c)) for shape in SHAPES] for c in chains]
    parameters = [nn.Parameter(torch.stack(own) if len(chains) > 1 else own[0]) for own in zip(*starts, strict=True)]
    return parameters, make(parameters, lr=lr, num_data=NUM_DATA, num_chains=len(chains), first_chain=chains[0], seed=5)


def _walk(parameters: list[nn.Parameter], sampler: Sampler, steps: range) -> None:
    """Make steps with step sizes and temperatures that change."""
    for step in steps:
        sampler.set_control("lr", sampler.defaults["lr"] / (1 + step % 3))
        sampler.set_control("temperature", (0.0 if sampler.has_cold_limit else 2.0, 1.0, 0.5)[step % 3])
        for parameter in parameters:
            parameter.grad = 0.3 * parameter.detach() + 0.1 * step
        sampler.step()


def _equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def _check_resume(make: Callable[..., Sampler], lr: float) -> None:
    whole, sampler = _made(make, lr, (0,))
    _walk(whole, sampler, range(STEPS))
    for stop in range(STEPS):
        parameters, sampler = _made(make, lr, (0,))
        _walk(parameters, sampler, range(stop))
        file = io.BytesIO()
        torch.save({"parameters": [p.detach() for p in parameters], "sampler": sampler.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        parameters, sampler = _made(make, lr, (0,))
        for parameter, value in zip(parameters, saved["parameters"], strict=True):
            parameter.data.copy_(value)
        sampler.load_state_dict(saved["sampler"])
        _walk(parameters, sampler, range(stop, STEPS))
        assert _equal(whole, parameters), (
            f"a sampler saved after step {stop} continues differently: keep what it carries from step to step in "
            "self.state (self._buffers) or in the parameter group, not in attributes"
        )


def _check_chains(make: Callable[..., Sampler], lr: float) -> None:
    chains = tuple(range(CHAINS))
    stacked, sampler = _made(make, lr, chains)
    _walk(stacked, sampler, range(STEPS))
    for chain in chains:
        alone, sampler = _made(make, lr, (chain,))
        _walk(alone, sampler, range(STEPS))
        assert all(torch.equal(p.detach(), q.detach()[chain]) for p, q in zip(alone, stacked, strict=True)), (
            f"chain {chain} of {CHAINS} stacked ones is not the chain alone: no operation of update may join chains, "
            "the leading axis of a parameter"
        )


def _check_generators(make: Callable[..., Sampler], lr: float) -> None:
    ends = []
    for seed in (17, 18):
        parameters, sampler = _made(make, lr, (0,))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        _walk(parameters, sampler, range(STEPS))
        assert torch.equal(torch.get_rng_state(), before), (
            "a step draws from torch's default generator: use the noise that update gets"
        )
        ends.append(parameters)
    assert _equal(*ends), "the draws depend on torch's default generator: use the noise that update gets"
    given: list[bool] = []
    parameters, sampler = _made(make, lr, (0,))
    rule = sampler.update

    def watched(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None) -> None:
        given.append(noise is not None)
        rule(group, params, grads, noise)

    vars(sampler)["update"] = watched
    _walk(parameters, sampler, range(3))
    assert given == [not sampler.has_cold_limit, True, True], (
        "a step at temperature 0 has noise, or one at another has none"
    )


def _check_law(make: Callable[..., Sampler], lr: float, steps: int) -> None:
    curvature = torch.tensor(CURVATURES)[:, None]
    for temperature in (1.0, 0.25):
        place = nn.Parameter(torch.zeros(len(CURVATURES), DRAWN))
        sampler = make([place], lr=lr, num_data=NUM_DATA, seed=1, temperature=temperature)
        for _ in range(steps):
            place.grad = curvature * place.detach()
            sampler.step()
        found: Tensor = exact(place.detach()).square().mean(1) * NUM_DATA * curvature[:, 0] / temperature
        worst = float((found - 1).abs().max())
        assert worst < TOLERATED, (
            f"at temperature {temperature:g} and lr={lr:g} the variances are {found.tolist()} times the target's: the "
            "noise's variance is 2·lr·τ/N for SGLD; a smaller lr separates an error of the rule from that of the step"
        )
