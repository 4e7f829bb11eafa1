"""Accumulated gradients over a loader of unknown length: an epoch may end in the middle of a step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, ChainStrategy, Gaussian, UnderdampedLangevin
from lightning_sgmcmc.callbacks import EWSG, CyclicalSchedule, SampleCollector, SamplingSchedule
from tests.support.problems import Stream
from tests.support.recorders import Dump, Each
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:lr=0")

BATCHES, NUM_DATA = 5, 40


def batches(rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3 + rank)
    return [(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(BATCHES)]


class OwnStream(Stream):
    """Other data on each rank."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(dist.get_rank()))


class Line(BayesianModule):
    """A line with learned noise; its chains differ in their start."""

    def __init__(self, num_chains: int = 1, **options: Any) -> None:
        chosen = {"sampler": SGHMC, "lr": 0.0, "seed": 1, "num_data": NUM_DATA} | options
        super().__init__(num_chains=num_chains, likelihood=Gaussian(0.7, learned=True), **chosen)
        self.net = nn.Linear(3, 1)


class Steps(Each):
    """Each step's energies (C,) in nats and gradients of the potential (C, d)."""

    def __init__(self) -> None:
        super().__init__("on_before_optimizer_step", self.look)

    @staticmethod
    def look(trainer: Any, module: Any, optimizer: Any) -> tuple[Tensor, Tensor]:
        gradients = [p.grad.reshape(module.num_chains, -1) for p in module.parameters()]
        return module.chains.observed.energy.clone(), torch.cat(gradients, 1).double() * module.num_data


def fit(module: Line, stream: Any, steps: Steps, callbacks: Any = (), **options: Any) -> None:
    trainer = quiet_trainer(
        **({"max_epochs": 2, "callbacks": [SamplingSchedule(every_n_steps=1), *callbacks, steps]} | options)
    )
    trainer.fit(module, torch.utils.data.DataLoader(stream, batch_size=None))


def truth(module: Line, chain: int, of: list[tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
    """Return the mean potential energy of these batches and its gradient, at a chain's state."""
    with module.at_chain(chain):
        each = [-module.num_data * module.log_likelihood(batch).mean() - module.log_prior() for batch in of]
        energy = torch.stack(each).mean()
        gradients = torch.autograd.grad(energy, list(module.parameters()))
        return energy.item(), torch.cat([g.reshape(-1) for g in gradients]).double()


@pytest.mark.parametrize(
    ("chains", "options"),
    [(1, {}), (3, {"chain_execution": "loop"}), (3, {"chain_execution": "vmap"})],
)
def test_a_short_step_has_the_mean_gradient_of_its_own_batches(chains: int, options: dict[str, Any]) -> None:
    """5 batches by 3: the second step of an epoch has 2. Chains do not move, as lr is 0."""
    module = Line(chains, shared_batch=True, **options)
    steps = Steps()
    fit(module, Stream(batches()), steps, accumulate_grad_batches=3)
    assert len(steps.seen) == 4
    for number, (energies, gradients) in enumerate(steps.seen):
        own = batches()[:3] if number % 2 == 0 else batches()[3:]
        for chain in range(chains):
            energy, gradient = truth(module, chain, own)
            assert energies[chain].item() == pytest.approx(energy, rel=1e-5)
            torch.testing.assert_close(gradients[chain], gradient, rtol=1e-4, atol=1e-3)


def test_a_short_step_of_ewsg_chooses_among_its_own_batches() -> None:
    """5 batches, two candidates of 2 each: the second step has the fifth batch only."""
    module = Line(sampler=UnderdampedLangevin)
    steps = Steps()
    fit(module, Stream(batches()), steps, [EWSG(1)], accumulate_grad_batches=2)
    gradients = [gradient[0] for _, gradient in steps.seen]
    candidates = [truth(module, 0, own)[1] for own in (batches()[:2], batches()[2:4])]
    distances = [(gradients[0] - candidate).abs().max() for candidate in candidates]
    assert min(distances) < 1e-3
    torch.testing.assert_close(gradients[1], truth(module, 0, batches()[4:])[1], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_short_step_on_two_ranks_has_the_mean_of_both(tmp_path: Path, execution: Any) -> None:
    steps, num_data = Steps(), 2 * NUM_DATA
    module = Line(2, shared_batch=True, chain_execution=execution, num_data=num_data)
    fit(
        module,
        OwnStream(),
        steps,
        [Dump(tmp_path, lambda module: ([gradient for _, gradient in steps.seen], module.state_dict()))],
        max_epochs=1,
        devices=2,
        strategy=ChainStrategy(ranks_per_chain=2, start_method="fork"),
        use_distributed_sampler=False,
        accumulate_grad_batches=3,
    )
    for gradients, state in Dump.read(tmp_path):
        at_end = Line(2, num_data=num_data)
        at_end.load_state_dict(state)
        for gradient, part in zip(gradients, (slice(0, 3), slice(3, 5)), strict=True):
            for chain in range(2):
                own = batches(0)[part] + batches(1)[part]
                torch.testing.assert_close(gradient[chain], truth(at_end, chain, own)[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("limit", [{}, {"max_steps": 11}])
def test_a_schedule_covers_the_steps_of_a_growing_accumulation(limit: dict[str, int]) -> None:
    """Two epochs of five steps and two of three: the last draw is that of the last step."""
    growing = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    cycle = CyclicalSchedule(num_cycles=1, samples_per_cycle=2)
    trainer = quiet_trainer(**({"max_epochs": 4} | limit), callbacks=[growing, cycle, SampleCollector(in_memory=True)])
    module = Line(lr=1e-3)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert trainer.global_step == limit.get("max_steps", 16)
    assert module.posterior is not None
    assert [draw.step for draw in module.posterior][-1] == trainer.global_step
    assert module.plan is not None
    assert module.plan.steps == trainer.global_step
