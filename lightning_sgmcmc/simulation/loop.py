"""A light loop without a trainer: this library's samplers and contour on thousands of chains at once.

The loop calls the update rules of `lightning_sgmcmc.samplers` and `lightning_sgmcmc.contour` on an analytic target;
chains may share a contour, or exchange temperatures (`lightning_sgmcmc.replica_exchange`). Blocks of steps are unrolled
and compiled if a C++ compiler is found and the run is long enough to benefit: an eager step of a few chains is
mostly overhead.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.samplers import SGLD, Sampler
from lightning_sgmcmc.simulation.contour_run import ContourRun
from lightning_sgmcmc.simulation.exchange_run import ExchangeRun, Ladders
from lightning_sgmcmc.simulation.results import DrawRecorder, Recording, Simulation
from lightning_sgmcmc.simulation.starts import draw_starting_places, starting_places
from lightning_sgmcmc.simulation.steps import CHUNK, ChainNoise, NoiseLevels, TargetSteps, is_worth_compiling
from lightning_sgmcmc.simulation.targets import Density
from lightning_sgmcmc.tensors import has_float64

Schedule: TypeAlias = "float | Callable[[int], float]"
"""A number, or a function of the step k = 1, 2, …"""


def simulate(
    target: Density,
    sampler: Callable[..., Sampler] = SGLD,
    *,
    lr: Schedule,
    num_steps: int,
    num_chains: int = 1,
    temperature: Schedule = 1.0,
    contour: ContourRun | None = None,
    energy_noise: float = 0.0,
    gradient_noise: float = 0.0,
    initial: Tensor | None = None,
    keep_every: int | None = None,
    burn_in: int = 0,
    observe: Callable[[Tensor], Tensor] | None = None,
    checkpoints: Sequence[int] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    compile: bool | None = None,
    exchange: ExchangeRun | None = None,
) -> Simulation:
    """Run chains on a target.

    Step k of a chain computes the energy U(x) and the gradient, with their noise; with a contour the energy's bin,
    multiplier and log Ψ, or with an exchange its swaps; then the sampler's update, and the contour's learning step.

    Args:
        target: the density, with `dimension`, `energy` and `gradient`.
        sampler: a sampler class, or a partial of one; N is 1, so that `lr` is the papers' ε.
        lr: step size.
        num_steps: steps of each chain.
        num_chains: C.
        temperature: τ; while it is 0, a contour learns nothing.
        contour: contour sampling.
        energy_noise: standard deviation of the Gaussian noise on the energy that the contour, or the exchange, uses, in
            nats.
        gradient_noise: standard deviation of the noise on each coordinate of the gradient.
        initial: initial positions, shape (C, d) or (d,); None draws them from a standard normal.
        keep_every: steps between draws that are kept after the burn-in; None keeps none.
        burn_in: steps before the first draw's interval and before averages count.
        observe: function from (…, d) to (…, F) whose weighted averages are recorded, each chain's over all its slots.
        checkpoints: increasing steps at which the averages are recorded.
        seed: chain c draws only from streams of (seed, c), whatever the number of chains.
        dtype: dtype of the positions; the contour uses float64.
        device: device of all tensors.
        compile: whether to compile blocks of steps; None compiles long runs if there is a C++ compiler.
        exchange: swaps of temperatures and step sizes between chains; ladder l draws from the stream of (seed, l).

    Raises:
        ValueError: for an argument out of range or of the wrong shape, an exchange with a contour, with a sampler that
            has momentum or at a temperature of 0, or a final position that is not finite.
    """
    recording = Recording(keep_every, burn_in, observe, checkpoints)
    levels = NoiseLevels(energy_noise, gradient_noise)
    _check_simulation(num_steps, num_chains, recording, levels)
    if exchange is not None and contour is not None:
        raise ValueError("an exchange cannot be combined with a contour, whose π would be learned at all temperatures")
    if initial is None:
        initial = draw_starting_places(num_chains, target.dimension, seed)
    device = torch.device(device)
    if not has_float64(device):
        raise ValueError(f"device must have float64, which a contour and energies need, got {device}: use device='cpu'")
    place = nn.Parameter(starting_places(initial, num_chains, target.dimension, dtype, device))
    rule = sampler([place], lr=_at(lr, 1), num_data=1, temperature=1.0, num_chains=num_chains, seed=seed)
    ladders = None if exchange is None else Ladders(exchange, num_chains, seed, place)
    steps = TargetSteps(target, rule, place, levels, contour, ladders)
    noise = ChainNoise(seed, place, levels, rule.draws)
    if compile is None:
        compile = is_worth_compiling(num_steps, device)
    block = steps.compiled() if compile else steps.run
    recorder = DrawRecorder(recording, None if contour is None else contour.contour)
    length = steps.block_length
    with torch.no_grad():
        for first in range(1, num_steps + 1, CHUNK):
            count = min(CHUNK, num_steps + 1 - first)
            inputs = [*_controls(lr, temperature, contour, first, count, place), *noise.draw()]
            if ladders is not None:
                if not bool((inputs[1] > 0).all()):
                    raise ValueError("the swap rate is undefined at temperature=0: keep the temperature positive")
                inputs += ladders.draw(first, count)
            pieces = zip(*(part[:count].split(length) for part in inputs), strict=True)
            # A shorter last block has another shape than the compiled ones.
            done = [(block if len(piece[0]) == length else steps.run)(*piece) for piece in pieces]
            recorder.record(first, *(torch.cat(part) for part in zip(*done, strict=True)))
    if not bool(place.isfinite().all()):
        raise ValueError(f"a chain diverged to infinity within {num_steps} steps: use a smaller lr")
    return recorder.result(place.detach().clone(), steps.state)


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step)) if callable(schedule) else float(schedule)


def _controls(
    lr: Schedule, temperature: Schedule, contour: ContourRun | None, first: int, count: int, place: Tensor
) -> Iterable[Tensor]:
    """Return ε, τ and ω of the steps first, first + 1, …; ω is 0 where τ is."""

    def values(schedule: Schedule) -> list[float]:
        return [_at(schedule, k) for k in range(first, first + count)] if callable(schedule) else [schedule] * count

    temperatures = values(temperature)
    step_sizes = [0.0] * count
    if contour is not None:
        rates = (contour.step_size.at(k) for k in range(first, first + count))
        step_sizes = [rate if tau > 0 else 0.0 for rate, tau in zip(rates, temperatures, strict=True)]
    for numbers, dtype in ((values(lr), place.dtype), (temperatures, place.dtype), (step_sizes, torch.float64)):
        yield torch.tensor(numbers, dtype=dtype, device=place.device)


def _check_simulation(num_steps: int, num_chains: int, recording: Recording, levels: NoiseLevels) -> None:
    check_count("num_steps", num_steps)
    check_count("num_chains", num_chains)
    check_number("energy_noise", levels.energy)
    check_number("gradient_noise", levels.gradient)
    recording.check(num_steps)
