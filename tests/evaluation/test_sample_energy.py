"""The energy and the weight of a contour's sample are those of the sample itself, and drawing them disturbs nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_sgmcmc import SGLD, ContourRules, Gaussian
from lightning_sgmcmc.callbacks import ContourGradient, SampleCollector, SamplingSchedule, VarianceReducedEnergy
from lightning_sgmcmc.chains.execution import StatelessCall
from lightning_sgmcmc.chains.samples import PosteriorSample
from tests.support.problems import ConjugateRegression, Data, Even, Net, Plain
from tests.support.trainers import quiet_trainer


def fit(model: Any, datamodule: Any, *more: Any, every: int = 5, kind: Any = "own", **options: Any) -> Any:
    """Return the samples of a run of 25 steps with a contour, and the run's module."""
    learner = ContourGradient(ContourRules(2.0), 40, first_edge=40.0, width=4.0, sample_energy=kind)
    callbacks = [SamplingSchedule(every_n_steps=every), SampleCollector(in_memory=True), *more, learner]
    torch.manual_seed(0)
    module = model(**options)
    quiet_trainer(max_steps=25, callbacks=callbacks).fit(module, datamodule=datamodule)
    assert module.posterior is not None
    return list(module.posterior), module


def energy_of(sample: PosteriorSample, data: Any) -> float:
    """Return U of a sample of `Plain` over all training data, by the definition."""
    data.setup("fit")
    part, model = data.splits[0], Plain()
    log_likelihood = StatelessCall(model, type(model).log_likelihood).call(sample.state, (part.inputs, part.targets))
    return -float(log_likelihood.double().sum() + model.prior.log_prob(sample.parameters))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_chains": 3, "chain_execution": "loop"}, {"num_chains": 3, "chain_execution": "vmap"}],
    ids=["one", "loop", "vmap"],
)
def test_full_batches_give_a_sample_its_own_energy(options: dict[str, Any]) -> None:
    """With all data in a batch there is no noise; the last sample's weight follows from its energy and the last π."""
    samples, module = fit(Plain, Even(64), **options)
    for sample in samples:
        assert sample.energy == pytest.approx(energy_of(sample, Even(64)), rel=1e-5)
    last = samples[-module.num_chains :]
    energies = torch.tensor([sample.energy for sample in last], dtype=torch.float64)
    expected = module.contour.log_weights(energies, torch.tensor([sample.chain for sample in last]))
    assert [sample.log_weight for sample in last] == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)
    bins = ((energies - 40) / 4).ceil().clamp(0, 39).int().tolist()
    assert [sample.bin for sample in last] == bins


@pytest.mark.parametrize("accumulated", [1, 2])
def test_mini_batches_give_an_energy_without_bias(accumulated: int) -> None:
    """The mean of Ũ - U over 100 samples, in standard errors: beyond 4 for one seed in 15,000.

    The energy of the step's own batch after the step would be lower by ε·tr Var(∇Ũ), which is more than 10 of them.
    """
    problem = ConjugateRegression(num_data=120, features=3, outputs=20)
    module = problem.module(sampler=SGLD, lr=0.3, seed=1)
    callbacks = [
        SamplingSchedule(every_n_steps=1),
        ContourGradient(ContourRules(0.5), 40, first_edge=2000.0, width=50.0),
        SampleCollector(in_memory=True),
    ]
    loader = problem.loader(10)
    quiet_trainer(max_steps=100, callbacks=callbacks, accumulate_grad_batches=accumulated).fit(module, loader)
    assert module.posterior is not None
    x, y = problem.dataset().tensors
    excess = []
    for sample in module.posterior:
        weight = sample.parameters["net.weight"]
        likelihood = Gaussian(problem.noise_std).log_prob(x @ weight.T, y).double().sum()
        prior = -weight.double().square().sum() / 2 - weight.numel() * math.log(2 * math.pi) / 2
        excess.append(sample.energy + float(likelihood + prior))
    values = torch.tensor(excess, dtype=torch.float64)
    error = values.std().item() / math.sqrt(len(values))
    print(f"mean of Ũ - U: {values.mean():.2f} ± {error:.2f} nats")
    assert abs(values.mean().item()) < 4 * error
    assert values.std() > 5, "the batches must have noise"


def test_nothing_else_changes() -> None:
    """Draws, running statistics, dropout and augmentation are those of a run without the samples' own energies."""
    own, step = (fit(Net, Data(), kind=kind, every=4, num_chains=2)[0] for kind in ("own", "step"))
    for one, other in zip(own, step, strict=True):
        assert one.energy != other.energy
        for name, value in one.state.items():
            assert torch.equal(value, other.state[name]), name


def test_control_variates_correct_the_samples_energies_too() -> None:
    """At the snapshot itself the corrected energy is exact: lr is 0 but for rounding, so all samples are there."""
    samples, _ = fit(Plain, Even(8), VarianceReducedEnergy(0, 1), lr=1e-12, temperature=1e-12)
    for sample in samples:
        assert sample.energy == pytest.approx(energy_of(sample, Even(8)), rel=1e-5)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = Even(8)
        data.setup("fit")
        return iter(list(zip(data.splits[0].inputs, data.splits[0].targets, strict=True)))


def test_data_without_a_length_fall_back_to_the_steps_energy(tmp_path: Path) -> None:
    module = Plain(num_data=64)
    callbacks = [
        SamplingSchedule(every_n_steps=2),
        ContourGradient(ContourRules(2.0), 40, first_edge=40.0, width=4.0),
        SampleCollector(in_memory=True),
    ]
    with pytest.warns(UserWarning, match="sample's weight is that of the state before its step"):
        quiet_trainer(max_steps=4, callbacks=callbacks).fit(module, DataLoader(Stream(), batch_size=8))
    assert module.posterior is not None
    assert all(math.isfinite(record.energy) for record in module.posterior.records)
