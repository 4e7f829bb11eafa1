"""Preconditioners that are frozen after burn-in: when they adapt, and the law of the chains that they leave.

After the freeze each coordinate is a linear recursion with its own constant step size, so on a Gaussian with full
gradients its stationary variance is known exactly, given the frozen diagonal.
"""

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc.callbacks import CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.samplers import AdamSGLD, Sampler, ScaleAdaptedSGHMC, pMCLMC, pSGHMC, pSGLD
from tests.support.comparisons import assert_same
from tests.support.problems import Data, Net
from tests.support.trainers import quiet_trainer, seeded

N, COUNT, ADAPT = 20, 2000, 300
CURVATURES = (0.01, 1.0, 100.0)
FRICTION, BETA = 0.3, 0.8

FROZEN = [
    pytest.param(functools.partial(pSGLD, alpha=0.99), 0.02, id="pSGLD"),
    pytest.param(functools.partial(AdamSGLD, betas=(BETA, 0.99)), 0.02, id="AdamSGLD"),
    pytest.param(functools.partial(pSGHMC, alpha=0.99, friction=FRICTION), 0.1, id="pSGHMC"),
    pytest.param(functools.partial(ScaleAdaptedSGHMC, friction=FRICTION), 0.01, id="ScaleAdaptedSGHMC"),
]


def system(kind: type[Sampler], pull: Tensor, curvature: float, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return drift and noise covariance of the state (θ, momentum or averaged gradient), shapes (D, 2, 2).

    Args:
        kind: the sampler.
        pull: lr·G of each coordinate, shape (D,).
        curvature: λ, with the mean potential λ·θ²/2.
        noise: 2·lr·τ·G/N.
    """
    zero, one = torch.zeros_like(pull), torch.ones_like(pull)
    if kind is pSGLD:
        rows = [[1 - pull * curvature, zero], [zero, zero]]
        spread = [[noise, zero], [zero, zero]]
    elif kind is AdamSGLD:
        rows = [[1 - pull * (1 - BETA) * curvature, -pull * BETA], [(1 - BETA) * curvature * one, BETA * one]]
        spread = [[noise, zero], [zero, zero]]
    else:
        scale, heat = (FRICTION, FRICTION**2) if kind is pSGHMC else (1.0, FRICTION)
        rows = [[1 - scale * pull * curvature, (1 - FRICTION) * one], [-scale * pull * curvature, (1 - FRICTION) * one]]
        spread = [[heat * noise, heat * noise]] * 2
    return tuple(torch.stack([torch.stack(row, -1) for row in m], -2) for m in (rows, spread))  # type: ignore[return-value]


def stationary(kind: type[Sampler], pull: Tensor, curvature: float, noise: Tensor) -> Tensor:
    """Return the stationary variance of each coordinate θ, shape (D,), from S = F·S·Fᵀ + Q."""
    drift, spread = system(kind, pull, curvature, noise)
    transfer = torch.einsum("dij,dkl->dikjl", drift, drift).reshape(-1, 4, 4)
    return torch.linalg.solve(torch.eye(4, dtype=pull.dtype) - transfer, spread.reshape(-1, 4, 1))[:, 0, 0]


def walked(
    make: Any,
    lr: float,
    steps: int,
    count: int = COUNT,
    curvatures: Any = CURVATURES,
    spread: float = 1.0,
    **options: Any,
) -> tuple[list[nn.Parameter], Any]:
    """Return places after steps on Gaussians of these curvatures."""
    generator = torch.Generator().manual_seed(0)
    places = [nn.Parameter(spread * torch.randn(count, generator=generator, dtype=torch.float64)) for _ in curvatures]
    sampler = make(places, lr=lr, num_data=N, seed=1, **options)
    for _ in range(steps):
        for place, curvature in zip(places, curvatures, strict=True):
            place.grad = curvature * place.detach()
        sampler.step()
    return places, sampler


@pytest.mark.by_default("-1.0")
@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize(("make", "lr"), FROZEN)
def test_a_frozen_chain_has_the_exact_law_of_its_diagonal(make: Any, lr: float, temperature: float) -> None:
    """Condition number 10⁴; means and variances over 2,000 coordinates within 5 standard errors.

    False alarm: 12 comparisons of 6e-7 for each sampler.
    """
    kind = make.func
    places, sampler = walked(make, lr, ADAPT + 1000, adapt=ADAPT, temperature=temperature)
    diagonals = sampler.preconditioner(places)
    ratios = []
    for place, curvature, diagonal in zip(places, CURVATURES, diagonals, strict=True):
        variance = stationary(kind, lr * diagonal, curvature, 2 * lr * temperature * diagonal / N)
        z = place.detach() / variance.sqrt()
        assert abs(float(z.mean())) < 5 / COUNT**0.5
        assert abs(float(z.square().mean()) - 1) < 5 * (2 / COUNT) ** 0.5
        ratios.append(float(variance.mean()) * N * curvature / temperature)
    # The exact law is near the target where lr·G·λ is small, and off it where it is not: the check can tell them apart.
    assert ratios[0] == pytest.approx(1, abs=0.1)
    assert ratios[2] > 1.02


@pytest.mark.parametrize(("make", "lr"), FROZEN)
def test_each_group_has_the_preconditioner_of_its_own_options(make: Any, lr: float) -> None:
    option = "floor" if make.func in (pSGHMC, ScaleAdaptedSGHMC) else "eps"
    first, second, alone = (nn.Parameter(torch.linspace(1, 2, 5, dtype=torch.float64)) for _ in range(3))
    groups = [{"params": [first]}, {"params": [second], option: 0.5}]
    both, one = make(groups, lr=lr, num_data=N, temperature=0.0), make([alone], lr=lr, num_data=N, temperature=0.0)
    one.param_groups[0][option] = 0.5
    for _ in range(3):
        for place in (first, second, alone):
            place.grad = place.detach().clone()
        both.step()
        one.step()
    assert torch.equal(second, alone)
    assert torch.equal(both.preconditioner([second])[0], one.preconditioner([alone])[0])
    assert not torch.equal(both.preconditioner([second])[0], both.preconditioner([first])[0])


@pytest.mark.parametrize(("make", "lr"), FROZEN)
def test_the_bias_of_a_frozen_chain_is_of_first_order(make: Any, lr: float) -> None:
    """The slope of log bias over log lr with one frozen diagonal, exactly computed."""
    places, sampler = walked(make, lr, ADAPT, count=200, adapt=ADAPT)
    diagonal = sampler.preconditioner(places)[1]
    steps = lr * np.array([1.0, 0.5, 0.25, 0.125])
    biases = [float(stationary(make.func, h * diagonal, 1.0, 2 * h * diagonal / N).mean()) * N - 1 for h in steps]
    slope = np.polyfit(np.log(steps), np.log(biases), 1)[0]
    assert slope == pytest.approx(1, abs=0.05)


def test_the_bias_of_an_adapting_chain_does_not_vanish() -> None:
    """The law of dynamics without Γ is exp(-U)/G as lr → 0; with 2,000 coordinates the standard error is 0.03."""

    def bias(adapt: Any, lr: float) -> float:
        make = functools.partial(pSGLD, alpha=0.9, eps=0.05)
        (place,), _ = walked(make, lr, 1200, curvatures=(1.0,), spread=N**-0.5, adapt=adapt)
        return float(place.detach().square().mean()) * N - 1

    adapting = [bias("always", lr) for lr in (0.004, 0.002)]
    assert min(adapting) > 0.3
    assert adapting[1] > 0.8 * adapting[0]
    assert abs(bias(300, 0.004)) < 0.2  # its own bias is 0.01, and five standard errors are 0.16


# -- when it adapts ---------------------------------------------------------------------------------------------------


class Watch(pl.Callback):
    """Records the preconditioner of each step with the stage."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        sampler = pl_module.sampler
        squares = [t.clone().flatten() for p in sampler.state.values() for n, t in p.items() if n == "square_avg"]
        self.seen.append((pl_module.chains.progress.stage.value, torch.cat(squares)))


SAMPLERS = [
    AdamSGLD,
    ScaleAdaptedSGHMC,
    functools.partial(pSGLD, adapt="burn-in"),
    functools.partial(pSGHMC, adapt=4),
    pMCLMC,
]


def fitted(sampler: Any, schedule: Any, steps: int, callbacks: Any = (), **options: Any) -> Any:
    module = seeded(lambda: Net(sampler=sampler, lr=0.01, seed=3, **options))
    trainer = quiet_trainer(max_steps=steps, callbacks=[schedule, *callbacks])
    trainer.fit(module, datamodule=Data())
    return module


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: getattr(s, "func", s).__name__)
def test_a_schedule_freezes_in_its_sampling_stage(sampler: Any, chains: int) -> None:
    watch = Watch()
    fitted(sampler, SamplingSchedule(burn_in_steps=6, every_n_steps=2), 12, [watch], num_chains=chains)
    changes = [not torch.equal(a, b) for (_, a), (_, b) in zip(watch.seen, watch.seen[1:], strict=False)]
    last = 4 if isinstance(sampler, functools.partial) and sampler.func is pSGHMC else 6
    assert changes == [True] * (last - 1) + [False] * (12 - last)


@pytest.mark.parametrize("sampler", SAMPLERS[:2], ids=lambda s: s.__name__)
def test_a_cycle_adapts_while_it_explores(sampler: Any) -> None:
    watch = Watch()
    schedule = CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=1)
    fitted(sampler, schedule, 12, [watch])
    stages = [stage for stage, _ in watch.seen]
    assert stages == (["exploration"] * 3 + ["sampling"] * 3) * 2
    for (_, before), (stage, after) in zip(watch.seen, watch.seen[1:], strict=False):
        assert torch.equal(before, after) == (stage == "sampling")


def test_a_fit_without_burn_in_is_refused() -> None:
    schedule = SamplingSchedule(every_n_steps=2)
    with pytest.raises(ValueError, match=r"AdamSGLD\(adapt='burn-in'\) .* SamplingSchedule begins .*burn_in_steps"):
        fitted(AdamSGLD, schedule, 6)
    fitted(functools.partial(AdamSGLD, adapt="always"), SamplingSchedule(every_n_steps=2), 6)


@pytest.mark.parametrize("value", ["never", 0, 2.5, True])
@pytest.mark.parametrize("kind", [pSGLD, AdamSGLD, pSGHMC, pMCLMC, ScaleAdaptedSGHMC])
def test_a_wrong_choice_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="adapt must be"):
        kind([nn.Parameter(torch.zeros(3))], num_data=N, adapt=value)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9])
def test_wrong_betas_are_refused(betas: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="betas"):
        AdamSGLD([nn.Parameter(torch.zeros(3))], num_data=N, betas=betas)


def test_a_loop_freezes_by_itself() -> None:
    place = nn.Parameter(torch.ones(3))
    sampler = AdamSGLD([place], num_data=N)
    assert sampler.needs_burn_in
    for step in range(6):
        if step == 3:
            sampler.set_adapting(False)
        place.grad = place.detach() * (1 + step)
        before = sampler.state[place].get("square_avg", torch.zeros(3)).clone()
        sampler.step()
        assert torch.equal(before, sampler.state[place]["square_avg"]) == (step >= 3)
    assert not sampler.needs_burn_in


@pytest.mark.parametrize("name", ["adapt", "averaged", "lr"])
def test_a_state_of_another_form_is_refused(name: str) -> None:
    place = nn.Parameter(torch.ones(3))
    sampler = pSGLD([place], num_data=N)
    saved = sampler.state_dict()
    del saved["param_groups"][0][name]
    with pytest.raises(ValueError, match=f"state of the sampler is damaged in {name}: resume from another checkpoint"):
        sampler.load_state_dict(saved)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("stop", [4, 10], ids=["in burn-in", "after it"])
@pytest.mark.parametrize("sampler", SAMPLERS[:2], ids=lambda s: s.__name__)
def test_a_fit_resumes_bit_for_bit(sampler: Any, stop: int, chains: int, tmp_path: Path) -> None:
    def run(folder: Path, ckpt: Any = None) -> Any:
        checkpoints = pl.callbacks.ModelCheckpoint(
            folder, filename="{step}", every_n_train_steps=stop, save_top_k=-1, enable_version_counter=False
        )
        collector = SampleCollector(folder / "samples")
        schedule = SamplingSchedule(burn_in_steps=7, every_n_steps=3)
        callbacks = [schedule, collector, checkpoints]
        trainer = quiet_trainer(max_steps=16, enable_checkpointing=True, callbacks=callbacks)
        module = seeded(lambda: Net(sampler=sampler, lr=0.01, seed=3, num_chains=chains))
        trainer.fit(module, datamodule=Data(), ckpt_path=ckpt)
        assert collector.posterior is not None
        return list(collector.posterior.store)

    whole = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    resumed = run(tmp_path / "resumed", tmp_path / "whole" / f"step={stop}.ckpt")
    assert_same(whole[-2 * chains :], resumed[-2 * chains :])


@pytest.mark.parametrize(("cls", "lr"), [(pSGLD, 0.005), (AdamSGLD, 0.002), (pSGHMC, 0.01), (ScaleAdaptedSGHMC, 0.005)])
def test_a_start_without_a_gradient_does_not_throw_the_chain_away(cls: Any, lr: float) -> None:
    """Chains that start at the mode get a first gradient of 0. Their variance is the target's, 1/N, to its step size's
    error; with the preconditioner 1/√V + 1e-8 alone it was up to ten million times as large."""
    chains, dimension, num_data = 100, 4, 50
    theta = nn.Parameter(torch.zeros(chains, dimension))
    sampler = cls([theta], lr=lr, num_data=num_data, num_chains=chains, adapt=500)
    squares = []
    for step in range(1500):
        theta.grad = theta.detach().clone()
        sampler.step()
        if step >= 700:
            squares.append(theta.detach().square().mean(1))
    ratio = num_data * torch.stack(squares).mean(0)
    assert abs(ratio.mean() - 1) < 0.2 + 4 * ratio.std() / chains**0.5
