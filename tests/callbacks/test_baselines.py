"""Deep ensembles, SWAG and MC dropout: what their samples are, against arithmetic by hand."""

import functools
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules, FlatPrior, Gaussian, Posterior
from lightning_sgmcmc.callbacks import (
    SWAG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    DeepEnsemble,
    MCDropout,
    RunSummary,
    SampleCollector,
    WarmStart,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.warm_start import chosen_decay, make_optimizer
from lightning_sgmcmc.report import write_report
from tests.support.problems import Even, Net, Plain, Stream, blobs, classifier
from tests.support.trainers import quiet_trainer


def fit(module: BayesianModule, *callbacks: pl.Callback, data: Any = None, **options: Any) -> Posterior:
    collector = SampleCollector(in_memory=True)
    trainer = quiet_trainer(callbacks=[*callbacks, collector], **options)
    trainer.fit(module, data if data is not None else DataLoader(blobs(), 24))
    assert collector.posterior is not None
    return collector.posterior


def kind_of(module: BayesianModule) -> str | None:
    """Return what the plan of a module's fit calls it."""
    assert module.plan is not None
    return module.plan.label


# -- deep ensembles ---------------------------------------------------------------------------------------------------


def test_a_member_is_torch_sgd_with_momentum_and_a_cosine_step_size() -> None:
    """Bit for bit, by a loop of torch's own optimizer over the mean potential."""
    member = fit(classifier(lr=0.1), DeepEnsemble(), max_epochs=3)[0]
    again = classifier(lr=0.1, num_data=96).train()
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(list(DataLoader(blobs(), 24)) * 3):
        optimizer.param_groups[0]["lr"] = 0.1 * (np.cos(np.pi * step / 12) + 1) / 2
        optimizer.zero_grad()
        (-again.log_likelihood(batch).mean() - again.log_prior() / 96).backward()
        optimizer.step()
    assert isinstance(member, PosteriorSample)
    assert member.step == 12
    for name, value in again.state_dict().items():
        torch.testing.assert_close(member.state[name], value, rtol=1e-6, atol=1e-7)


def test_an_ensemble_is_not_called_a_posterior(recwarn: pytest.WarningsRecorder) -> None:
    schedule, several, single = DeepEnsemble(), Plain(3), Plain()
    posterior = fit(several, schedule, data=Even(), max_epochs=1)
    assert kind_of(several) == "deep ensemble"
    assert [record.chain for record in posterior.records] == [0, 1, 2]
    assert not torch.equal(posterior[0].parameters["net.0.weight"], posterior[1].parameters["net.0.weight"])
    assert not [w for w in recwarn if "temperature=0" in str(w.message)]
    fit(single, schedule, data=Even(), max_epochs=1)
    assert kind_of(single) == "single network"


def test_a_member_by_another_optimizer_is_torchs_own_loop() -> None:
    """AdamW with its decoupled decay, a linear warm-up over three of twelve steps, two chains: the first chain's start
    and batches are the module's own."""
    optimizer = functools.partial(torch.optim.AdamW, weight_decay=0.5)
    schedule = DeepEnsemble(optimizer=optimizer, warm_up=0.25)
    members = fit(classifier(lr=0.1, num_chains=2, prior=FlatPrior()), schedule, max_epochs=3)
    again = classifier(lr=0.1, num_data=96, prior=FlatPrior()).train()
    own = optimizer(again.parameters(), lr=0.1)
    for step, batch in enumerate(list(DataLoader(blobs(), 24)) * 3):
        own.param_groups[0]["lr"] = 0.1 * (np.cos(np.pi * step / 12) + 1) / 2 * min(1, (step + 1) / 3)
        own.zero_grad()
        (-again.log_likelihood(batch).mean()).backward()
        own.step()
    for name, value in again.state_dict().items():
        torch.testing.assert_close(members[0].state[name], value, rtol=1e-6, atol=1e-7)
    assert not torch.equal(members[1].parameters["net.0.weight"], members[0].parameters["net.0.weight"])


REFUSED_OPTIMIZERS: list[tuple[dict[str, Any], list[pl.Callback], str]] = [
    ({}, [], r"weight_decay=0.5 of DeepEnsemble's AdamW would act beside prior=.*: pass prior=FlatPrior\(\) to the"),
    (
        {"prior": FlatPrior(), "lr": {"*.0.*": 0.1, "*": 0.2}},
        [],
        "AdamW.* needs one step size, got lr=.*: pass one number",
    ),
    ({"prior": FlatPrior()}, [WarmStart(steps=1)], "optimizes the whole run, and WarmStart its beginning: remove one"),
]


@pytest.mark.parametrize(("options", "others", "sentence"), REFUSED_OPTIMIZERS, ids=["prior", "lr", "warm start"])
def test_what_an_optimizer_cannot_do_is_refused(options: Any, others: Any, sentence: str) -> None:
    schedule = DeepEnsemble(optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.5))
    with pytest.raises(ValueError, match=sentence):
        fit(classifier(**options), schedule, *others, max_epochs=1)


@pytest.mark.parametrize(("options", "decay"), [({}, 0.0), ({"init_args": {"weight_decay": 0.5}}, 0.5)])
def test_a_configuration_names_the_optimizer(options: Any, decay: float) -> None:
    """AdamW's default decay of 0.01, which the command line's partial holds, is not chosen."""
    parser = ArgumentParser()
    parser.add_class_arguments(DeepEnsemble, "schedule")
    given = {"class_path": "torch.optim.AdamW"} | options
    schedule = parser.instantiate_classes(parser.parse_object({"schedule": {"optimizer": given}})).schedule
    assert chosen_decay(schedule.optimizer) == decay
    optimizer = make_optimizer(schedule.optimizer, [nn.Parameter(torch.zeros(2))], 0.1, decay)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, decay)


def test_an_optimizer_with_its_own_lr_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BayesianModule sets lr: pass BayesianModule\(lr=…\)"):
        DeepEnsemble(optimizer=functools.partial(torch.optim.AdamW, lr=0.1))
    with pytest.raises(ValueError, match=r"warm_up must be in \[0, 1\), got 1"):
        DeepEnsemble(warm_up=1)


def test_members_that_would_be_equal_are_refused() -> None:
    module = Plain(2, chain_start="same", shared_batch=True)
    with pytest.raises(ValueError, match=r"2 members of this DeepEnsemble would be equal.*omit one of the two"):
        fit(module, DeepEnsemble(), data=Even(), max_epochs=1)
    with pytest.raises(ValueError, match="DeepEnsemble needs a run with an end"):
        fit(Plain(), DeepEnsemble(), data=Even(), max_steps=-1)


# -- SWAG -------------------------------------------------------------------------------------------------------------


class Iterates(pl.Callback):
    """Records the parameters after every step, one row each, and the step size."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray[Any, Any]] = []
        self.lrs: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        parameters = [p.detach().double().reshape(pl_module.num_chains, -1) for p in pl_module.parameters()]
        self.rows.append(torch.cat(parameters, 1).numpy())
        self.lrs.append(pl_module.sampler.param_groups[0]["lr"])


def flat(sample: PosteriorSample) -> np.ndarray[Any, Any]:
    return torch.cat([p.double().reshape(-1) for p in sample.parameters.values()]).numpy()


def stated_law(iterates: np.ndarray[Any, Any], rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return mean and covariance of the Gaussian of Maddox et al. 2019, eq. (1), from iterates of shape (n, d)."""
    mean, variance = iterates.mean(0), (iterates**2).mean(0) - iterates.mean(0) ** 2
    if rank == 0:
        return mean, np.diag(variance)
    running = np.cumsum(iterates, 0) / np.arange(1, len(iterates) + 1)[:, None]
    deviations = (iterates - running)[-rank:]
    return mean, np.diag(variance) / 2 + deviations.T @ deviations / (2 * (len(deviations) - 1))


def check_draws(draws: np.ndarray[Any, Any], mean: np.ndarray[Any, Any], covariance: np.ndarray[Any, Any]) -> None:
    """Check mean and covariance of whitened draws: all entries within 5 standard errors (false alarm below 10⁻⁴)."""
    factor = np.linalg.cholesky(covariance)
    white = np.linalg.solve(factor, (draws - mean).T).T
    count, dimension = white.shape
    assert np.abs(white.mean(0)).max() < 5 / np.sqrt(count)
    errors = np.sqrt((1 + np.eye(dimension)) / count)
    assert (np.abs(white.T @ white / count - np.eye(dimension)) / errors).max() < 5


@pytest.mark.parametrize("rank", [0, 3])
def test_swag_draws_from_the_gaussian_of_its_iterates(rank: int) -> None:
    """On a linear-Gaussian model, two chains: 120 draws of each have the law that numpy states for the same iterates.

    The step size falls by a cosine to its constant. Fixed seeds; false alarm below 10⁻³.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(64, 1, generator=generator))
    module = BayesianModule(
        net=nn.Linear(3, 1), likelihood=Gaussian(), sampler=SGHMC, lr=0.1, num_chains=2, num_data=64, seed=0
    )
    recorder = Iterates()
    swag = SWAG(rank, num_draws=120, collection=0.5, every_n_steps=3)
    loader = DataLoader(data, 8, shuffle=True)
    posterior = fit(module, swag, recorder, data=loader, max_epochs=6)
    assert recorder.lrs[0] == pytest.approx(0.1)
    assert recorder.lrs[24:] == pytest.approx([0.05] * 24)
    collected = np.stack(recorder.rows)[[*range(26, 48, 3)]]  # (8, chains, d), the last after the last step
    for chain in range(2):
        mean, covariance = stated_law(collected[:, chain], rank)
        own = torch.cat([m[chain].reshape(-1) for m in swag.moments.mean.values()]).numpy()
        np.testing.assert_allclose(own, mean, rtol=1e-5)
        own = torch.cat([m[chain].reshape(-1) for m in swag.moments.variance.values()]).numpy()
        np.testing.assert_allclose(own, np.diag(stated_law(collected[:, chain], 0)[1]), rtol=1e-3)
        samples = [s for s in posterior if s.chain == chain]
        assert [(s.step, s.draw) for s in samples] == [(48, draw) for draw in range(120)]
        check_draws(np.stack([flat(s) for s in samples]), mean, covariance)
    assert kind_of(module) == "MultiSWAG"


def test_each_cycle_has_a_gaussian_of_its_own() -> None:
    recorder = Iterates()
    swag = SWAG(rank=2, num_draws=4, num_cycles=2, collection=0.5, every_n_steps=1, scale=1e-12)
    module = classifier(lr=0.1)
    posterior = fit(module, swag, recorder, max_epochs=4)
    assert [(r.step, r.cycle, r.draw) for r in posterior.records] == [
        (8 * c + 8, c, d) for c in (0, 1) for d in range(4)
    ]
    rows = np.stack(recorder.rows)[:, 0]
    for cycle in range(2):
        np.testing.assert_allclose(flat(posterior[4 * cycle]), rows[8 * cycle + 4 : 8 * cycle + 8].mean(0), atol=1e-5)
    assert kind_of(module) == "cycSWAG"


def test_a_drawn_network_has_batch_norm_statistics_and_an_energy_of_its_own() -> None:
    """The first layer's statistics are exact at the drawn weights, and the energy is U of the sample, on all data."""
    module = Net(2, num_data=64)
    data = Even(64)
    swag = SWAG(rank=2, num_draws=2, collection=0.8, every_n_steps=1, batch_norm_batches=None)
    posterior = fit(module, swag, data=data, max_epochs=8)
    train, own = data.splits[0], Net(num_data=64).eval()
    for sample in posterior:
        weight, bias = sample.parameters["net.0.weight"], sample.parameters["net.0.bias"]
        expected = train.inputs.mean(0) @ weight.T + bias
        torch.testing.assert_close(sample.buffers["net.1.running_mean"], expected, rtol=1e-4, atol=1e-5)
        own.load_state_dict(sample.state)
        energy = own.potential_energy((train.inputs, train.targets)).item()
        assert sample.energy == pytest.approx(energy, rel=1e-5)


REFUSED: list[tuple[Any, list[pl.Callback], dict[str, Any], str]] = [
    (classifier, [SWAG(every_n_steps=5)], {}, "a cycle collects 1 iterates.*train longer.*smaller every_n_steps"),
    (classifier, [SWAG()], {"data": DataLoader(Stream(blobs()), 24), "max_steps": 12}, "BatchNorm.*'net.1'.*data set"),
    (classifier, [DeepEnsemble(), MCDropout()], {}, "no nn.Dropout layer with p > 0.*add nn.Dropout"),
    (
        lambda: classifier(0.2),
        [SWAG(), MCDropout()],
        {},
        "SWAG and MCDropout cannot be combined: both replace a sample by draws",
    ),
    (
        lambda: classifier(0.2),
        [SWAG(), ContourGradient(ContourRules(1.0), first_edge=1.0, width=1.0)],
        {},
        "SWAG and ContourGradient cannot be combined|temperature=0 has none",
    ),
]


@pytest.mark.parametrize(("make", "callbacks", "options", "sentence"), REFUSED)
def test_refused(make: Any, callbacks: list[pl.Callback], options: dict[str, Any], sentence: str) -> None:
    module = make()
    if "data" in options:
        module.num_data = module.given_num_data = 96
    with pytest.raises(ValueError, match=sentence):
        fit(module, *callbacks, **({"max_epochs": 2} | options))


# -- MC dropout -------------------------------------------------------------------------------------------------------


def test_dropout_masks_are_samples_that_any_process_can_load(tmp_path: Path) -> None:
    """Every sample is one of the eight thinned networks, and the average has the law of the masks.

    Frequencies of the eight masks within 5 standard errors of their probabilities (fixed seed; false alarm 10⁻⁵).
    """
    p, draws, x = 0.3, 200, torch.tensor([[0.5, -1.0], [2.0, 0.3], [-0.7, 0.9]])

    def module() -> BayesianModule:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(p), nn.Linear(3, 2))
        return BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.1, seed=3)

    posterior = fit(module(), DeepEnsemble(), MCDropout(draws), max_epochs=2)
    prediction = posterior.predict(x, return_samples=True)
    expected, law = _thinned(posterior[0], x, p)
    distances = (prediction.sample_probabilities[:, None] - expected).abs().amax((2, 3))
    assert distances.min(1).values.max() < 1e-6  # each sample is a thinned network
    frequency = torch.bincount(distances.argmin(1), minlength=8) / draws
    assert ((frequency - law).abs() / (law * (1 - law) / draws).sqrt()).max() < 5
    torch.testing.assert_close(prediction.probabilities, (frequency.view(8, 1, 1) * expected).sum(0))
    # From disk, in other batches, and in the evaluation of the fit.
    model = module()
    callbacks = [DeepEnsemble(), MCDropout(8), SampleCollector(tmp_path), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=2, callbacks=callbacks)
    trainer.fit(model, DataLoader(blobs(), 24), DataLoader(blobs(20, 1), 8))
    stored = Posterior.load(tmp_path).predict([x[2:], x[:2]], return_samples=True).sample_probabilities
    torch.testing.assert_close(stored[:, 1:], prediction.sample_probabilities[:8, :2])
    nll = -Posterior.load(tmp_path).predict(blobs(20, 1).tensors[0]).probabilities.log()
    nll = nll.gather(1, blobs(20, 1).tensors[1][:, None]).mean()
    assert model.evaluations["val"].bma["nll"] == pytest.approx(nll.item(), rel=1e-5)


def _thinned(sample: PosteriorSample, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return the predictions of all thinned networks, (8, n, 2), and their probabilities, (8,)."""
    values = list(sample.parameters.values())
    predictions, law = [], []
    for kept in itertools.product([0.0, 1.0], repeat=3):
        mask = torch.tensor(kept)
        hidden = torch.tanh(x @ values[0].T + values[1]) * mask / (1 - p)
        predictions.append((hidden @ values[2].T + values[3]).softmax(-1))
        law.append((1 - p) ** sum(kept) * p ** (3 - sum(kept)))
    return torch.stack(predictions), torch.tensor(law)


@pytest.mark.parametrize(("chains", "name"), [(1, "MC dropout"), (2, "MC dropout ensemble")])
def test_the_outermost_baseline_names_the_run_everywhere(chains: int, name: str, tmp_path: Path) -> None:
    """In the plan, the health report, results.json and the page; and of a test by another process."""
    parts = [SampleCollector(tmp_path / "sgmcmc" / "samples"), BayesianModelAverage(), RunSummary()]
    callbacks = [MCDropout(2), DeepEnsemble(), ChainHealth(), *parts]
    module = Net(chains)
    quiet_trainer(max_epochs=1, callbacks=callbacks, default_root_dir=tmp_path).fit(module, datamodule=Even())
    results = json.loads((tmp_path / "sgmcmc" / "results.json").read_text())
    assert module.plan is not None
    assert module.health is not None
    assert module.plan.sentences()[0].startswith(f"Plan: {name}; {2 * chains} samples of ")
    assert [module.health.kind, results["kind"], results["plan"]["kind"]] == [name] * 3
    assert results["samples"] == f"networks ({name})"
    called = {"MC dropout": name, "MC dropout ensemble": f"an {name}"}[name]
    assert f"No, this is {called}: its networks" in results["sentences"]["sampled"]
    assert f"this run is {called}." in write_report(tmp_path / "sgmcmc").read_text()
    for again in ([MCDropout(2), DeepEnsemble(), *parts], parts):  # also by the run's health.json
        quiet_trainer(callbacks=again, default_root_dir=tmp_path).test(Net(chains), datamodule=Even(), verbose=False)
        results = json.loads((tmp_path / "sgmcmc" / "results.json").read_text())
        assert (results["stage"], results["kind"]) == ("test", name)


def test_whole_channels_are_dropped_together() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, 2))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.01, seed=1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 1, 3, 3), torch.arange(16) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        posterior = fit(module, DeepEnsemble(), MCDropout(6), data=DataLoader(data, 8), max_epochs=1)
    x = torch.randn(4, 1, 3, 3)
    each = posterior.predict(x, return_samples=True).sample_probabilities
    assert len({tuple(one.flatten().tolist()) for one in each}) > 1
