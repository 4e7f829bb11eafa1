"""What a run does under the trainer, held against direct computations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    Annealing,
    BayesianModule,
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    PolynomialDecay,
    Posterior,
    Prior,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.schedule import RunLength
from tests.support.problems import blob_network, blobs, classifier, loaders
from tests.support.recorders import Samples
from tests.support.trainers import quiet_trainer


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class Controls(pl.Callback):
    """Records what the sampler saw."""

    def __init__(self) -> None:
        self.lr: list[float] = []
        self.temperature: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.sampler.step_count > len(self.lr):
            self.lr.append(pl_module.sampler.param_groups[0]["lr"])
            self.temperature.append(pl_module.sampler.param_groups[0]["temperature"])


def test_loss_is_the_potential_over_n() -> None:
    module = classifier(num_data=96, prior=GaussianPrior(0.5))
    module.eval()
    batch = next(iter(loaders()[0]))
    logits = module(batch[0])
    log_prior = sum(torch.distributions.Normal(0.0, 0.5).log_prob(p).sum() for p in module.parameters())
    expected = 96 * nn.functional.cross_entropy(logits, batch[1]) - log_prior
    energy = module.potential_energy(batch)
    assert energy.shape == (1,)
    assert energy.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 2}, {"accumulate_grad_batches": 2}])
def test_n_is_the_length_of_the_training_data(options: dict[str, Any]) -> None:
    """... not the number of batches times their size, whatever the trainer leaves out."""
    module = classifier()
    train = DataLoader(blobs(100), 24, drop_last=True)
    quiet_trainer(max_epochs=1, **options).fit(module, train)
    assert module.num_data == module.sampler.num_data == 100


def test_short_accumulation_window_at_the_end_of_an_epoch() -> None:
    """Three batches in windows of two, in a fixed order: the second step has half the data, of the same weight."""
    module = classifier(sampler=SGLD, temperature=0.0, lr=0.1)
    module.net = nn.Linear(2, 2)  # without BatchNorm the sum over micro-batches is exact
    reference = nn.Linear(2, 2)
    reference.load_state_dict(module.net.state_dict())
    data = blobs(72)
    energies: list[float] = []

    class Energy(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            energies.append(pl_module.chains.observed.energy.item())

    quiet_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[Energy()]).fit(module, DataLoader(data, 24))
    expected = []
    for part in (slice(0, 48), slice(48, 72)):
        x, y = (t[part] for t in data.tensors)
        prior = GaussianPrior().log_prob(dict(reference.named_parameters()))
        loss = nn.functional.cross_entropy(reference(x), y, reduction="sum") / 36 - prior / 72
        expected.append(72 * loss.item())
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for p, g in zip(reference.parameters(), gradients, strict=True):
                p -= 0.1 * g
    for p, q in zip(module.net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert energies == pytest.approx(expected, rel=1e-6)


def test_evaluating_samples_does_not_touch_the_chain(tmp_path: Path) -> None:
    modules = []
    of_networks = ["segments", "geometry", "reliability", "traces"]
    dashboard = PosteriorDashboard("sample", every_n_samples=2, figures=of_networks)
    collector = SampleCollector(tmp_path / "samples")
    for extra in ([], [dashboard, collector, BayesianModelAverage("harmonic"), RunSummary()]):
        torch.manual_seed(3)
        module = classifier(dropout=0.3)
        trainer = quiet_trainer(max_epochs=4, callbacks=[CyclicalSchedule(2, 0.5, 2), *extra], num_sanity_val_steps=0)
        trainer.fit(module, *loaders())
        modules.append(module)
    assert same(*modules)


def test_cyclical_schedule_follows_equation_2_and_the_stages() -> None:
    controls, samples = Controls(), Samples()
    schedule = CyclicalSchedule(num_cycles=3, exploration=0.6, samples_per_cycle=2)
    module = classifier(temperature=0.5)
    quiet_trainer(max_epochs=10, callbacks=[schedule, controls, samples]).fit(module, *loaders())
    total, period = 40, 14
    for k in range(1, total + 1):
        r = ((k - 1) % period) / period
        assert controls.lr[k - 1] == pytest.approx(0.05 / 2 * (np.cos(np.pi * r) + 1), abs=1e-15)
        assert controls.temperature[k - 1] == (0.0 if r < 0.6 else 0.5)
    schedule.lay_out(RunLength(total))
    assert [0.05 * c.lr_factor for c in map(schedule.controls, range(1, total + 1))] == controls.lr
    # stages are the steps 10..14, 24..28 and 38..40 (the last cycle is two short)
    assert [s.step for s in samples.samples] == [12, 14, 26, 28, 39, 40]
    assert [s.cycle for s in samples.samples] == [0, 0, 1, 1, 2, 2]


def test_schedule_counts_optimizer_steps_under_accumulation() -> None:
    controls, samples = Controls(), Samples()
    quiet_trainer(
        max_epochs=6, accumulate_grad_batches=2, callbacks=[CyclicalSchedule(2, 0.5, 1), controls, samples]
    ).fit(classifier(), *loaders())
    assert len(controls.lr) == 12
    assert [s.step for s in samples.samples] == [6, 12]


def test_snapshot_mode_draws_no_noise() -> None:
    module, samples = classifier(), Samples()
    schedule = CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=1, temperature=0.0)
    quiet_trainer(max_epochs=4, callbacks=[schedule, samples]).fit(module, *loaders())
    assert [s.step for s in samples.samples] == [8, 16]
    assert module.sampler.state_dict()["sampler"]["noise"]["generators"] == []


def test_sampling_schedule_in_epochs_with_annealing() -> None:
    controls, samples = Controls(), Samples()
    schedule = SamplingSchedule(
        burn_in_epochs=2,
        every_n_epochs=2,
        burn_in_temperature=0.0,
        lr_annealing=Annealing(2.0, start_epoch=1),
        temperature_annealing=Annealing(1.5),
    )
    module = classifier()
    quiet_trainer(max_epochs=6, callbacks=[schedule, controls, samples]).fit(module, *loaders())
    assert [s.step for s in samples.samples] == [16, 24]
    for k in range(24):
        epoch = k // 4
        assert controls.lr[k] == pytest.approx(0.05 / 2 ** max(0, epoch - 1))
        assert controls.temperature[k] == pytest.approx(0 if epoch < 2 else 1.5**-epoch)
    schedule.lay_out(RunLength(24, steps_per_epoch=4))
    laid_out = [schedule.controls(k) for k in range(1, 25)]
    assert [0.05 * c.lr_factor for c in laid_out] == controls.lr
    target = module.temperature  # None stands for it
    found = [c.temperature_factor * (target if c.temperature is None else c.temperature) for c in laid_out]
    assert found == controls.temperature
    assert [c.stage.value for c in laid_out] == ["burn-in"] * 8 + ["sampling"] * 16


def test_polynomial_decay() -> None:
    controls = Controls()
    schedule = SamplingSchedule(every_n_steps=1, lr_decay=PolynomialDecay(a=0.1, b=5, gamma=0.6))
    quiet_trainer(max_epochs=3, callbacks=[schedule, controls]).fit(classifier(), *loaders())
    assert controls.lr == pytest.approx([0.1 * (5 + k) ** -0.6 for k in range(1, 13)])
    schedule.lay_out(RunLength(12, lr=0.05))
    assert controls.lr == pytest.approx([0.05 * schedule.controls(k).lr_factor for k in range(1, 13)])


def test_torch_schedulers_and_learning_rate_monitor_work(tmp_path: Path) -> None:
    class Scheduled(BayesianModule):
        def configure_optimizers(self) -> Any:
            sampler = super().configure_optimizers()
            return [sampler], [torch.optim.lr_scheduler.ExponentialLR(sampler, 0.5)]

    logger = pl.loggers.CSVLogger(tmp_path)
    monitor = pl.callbacks.LearningRateMonitor()
    module = Scheduled(net=blob_network(), likelihood=Categorical(), sampler=SGLD, lr=0.4)
    trainer = quiet_trainer(max_epochs=3, logger=logger, callbacks=[SamplingSchedule(every_n_steps=1), monitor])
    trainer.fit(module, *loaders())
    assert module.sampler.param_groups[0]["lr"] == pytest.approx(0.05)
    assert trainer.callback_metrics["lr-SGLD"] == pytest.approx(0.1)


def test_samples_are_states_of_the_chain_and_reach_everyone() -> None:
    seen: list[int] = []

    class Mine(BayesianModule):
        def on_posterior_sample(self, sample: PosteriorSample) -> None:
            assert all(torch.equal(sample.state[name], t) for name, t in self.state_dict().items())
            seen.append(sample.step)

    samples = Samples()
    module = Mine(net=blob_network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05)
    quiet_trainer(max_epochs=2, callbacks=[samples, SamplingSchedule(every_n_steps=3)]).fit(module, *loaders())
    assert seen == [s.step for s in samples.samples] == [3, 6]
    assert not torch.equal(samples.samples[0].parameters["net.0.weight"], samples.samples[1].parameters["net.0.weight"])
    assert "net.1.running_mean" in samples.samples[0].buffers
    assert np.isfinite(samples.samples[0].energy)


def test_fp16_scaler_skips_do_not_count() -> None:
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60))
    module, samples = classifier(sampler=SGLD, lr=0.01), Samples()
    trainer = quiet_trainer(max_epochs=10, plugins=[plugin], callbacks=[SamplingSchedule(every_n_steps=1), samples])
    trainer.fit(module, *loaders())
    assert module.sampler.step_count < trainer.global_step == 40
    assert [s.step for s in samples.samples] == list(range(1, module.sampler.step_count + 1))
    assert all(p.isfinite().all() for p in module.parameters())


class Crash(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 36:
            raise RuntimeError("crash")


def test_resume_goes_on_exactly(tmp_path: Path) -> None:
    """From a checkpoint in mid-cycle: the same parameters, samples and averages as without a stop.

    A plain DataLoader starts its epoch again on resume, so the checkpoint is one at the end of an epoch.
    """

    def run(folder: Path, *callbacks: pl.Callback, **fit: Any) -> BayesianModule:
        module = classifier()
        checkpoints = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=8, filename="{step}")
        own = [CyclicalSchedule(2, 0.5, 4), SampleCollector(folder / "samples"), BayesianModelAverage(), checkpoints]
        trainer = quiet_trainer(max_steps=40, enable_checkpointing=True, callbacks=[*own, *callbacks])
        trainer.fit(module, *loaders(), **fit)
        return module

    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "stopped", Crash())
    store = tmp_path / "stopped" / "samples"
    assert [r.step for r in Posterior.load(store).records] == [13, 15, 18, 20, 33, 35]
    checkpoint = tmp_path / "stopped" / "step=32.ckpt"
    torch.load(checkpoint, weights_only=True)  # nothing in it needs unpickling
    resumed = run(tmp_path / "stopped", ckpt_path=checkpoint)
    assert same(whole, resumed)
    assert whole.evaluations["val"].running == resumed.evaluations["val"].running
    assert len(resumed.evaluations["val"].running) == 8
    first, again = Posterior.load(tmp_path / "whole" / "samples"), Posterior.load(store)
    assert first.records == again.records
    assert len(again) == 8
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)


def test_test_metrics_are_those_of_the_stored_samples(tmp_path: Path) -> None:
    module = classifier()
    trainer = quiet_trainer(
        max_epochs=20, callbacks=[CyclicalSchedule(2, 0.5, 3), SampleCollector(tmp_path / "s"), BayesianModelAverage()]
    )
    train, val = loaders()
    trainer.fit(module, train, val)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (metrics,) = trainer.test(module, val, verbose=False)
    x, y = blobs(64, seed=1).tensors
    prediction = Posterior.load(tmp_path / "s").predict(x, return_samples=True)
    mean = prediction.sample_probabilities.mean(0).double()
    nll = -mean[torch.arange(64), y].log().mean().item()
    accuracy = (mean.argmax(1) == y).double().mean().item()
    singles = (prediction.sample_probabilities.argmax(2) == y).double().mean(1)
    for found in (metrics, {k.replace("val/", "test/"): v for k, v in logged.items()}):
        assert found["test/bma_nll"] == pytest.approx(nll, rel=1e-5)
        assert found["test/bma_accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert found["test/single_accuracy"] == pytest.approx(singles.mean().item(), abs=1e-6)
    assert module.evaluations["test"].single_std["accuracy"] == pytest.approx(singles.std().item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_harmonic_cycle_weights_are_equation_4(tmp_path: Path, temperature: float) -> None:
    """With the likelihood to the power 1/τ, as in the sampled density."""
    module = classifier(sampler=SGLD, lr=0.5, temperature=temperature)
    average = BayesianModelAverage(cycle_weights="harmonic")
    trainer = quiet_trainer(
        max_epochs=12, callbacks=[CyclicalSchedule(3, 0.5, 2), SampleCollector(tmp_path / "s"), average]
    )
    trainer.fit(module, *loaders())
    posterior = Posterior.load(tmp_path / "s")
    (x, y), (x_val, y_val) = blobs().tensors, blobs(64, seed=1).tensors
    on_train = posterior.predict(x, return_samples=True).sample_probabilities
    on_val = posterior.predict(x_val, return_samples=True).sample_probabilities
    assert on_train is not None
    assert on_val is not None
    log_likelihood = on_train.double()[:, torch.arange(96), y].log().sum(1).view(3, 2) / temperature
    log_weights = np.log(2) - torch.logsumexp(-log_likelihood, 1)
    assert log_weights.softmax(0).max() < 0.999, "the weights must be visible"
    combined = (log_weights.softmax(0)[:, None, None] * on_val.double().view(3, 2, 64, 2).mean(1)).sum(0)
    nll = -combined[torch.arange(64), y_val].log().mean().item()
    assert module.evaluations["val"].bma["nll"] == pytest.approx(nll, rel=1e-5)


def test_regression_is_scored_in_original_units(tmp_path: Path) -> None:
    """RMSE, NLL and coverage against the mixture of Gaussians written out."""

    class Data(pl.LightningDataModule):
        num_data, target_std = 60, 7.0

        def loader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(60, 2, generator=generator)
            return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(60, 1, generator=generator)), 20)

        train_dataloader = val_dataloader = loader

    module = BayesianModule(net=nn.Linear(2, 1), likelihood=Gaussian(0.8, learned=True), sampler=SGLD, lr=0.05)
    schedule = SamplingSchedule(every_n_steps=5)
    trainer = quiet_trainer(
        max_epochs=40, callbacks=[schedule, SampleCollector(tmp_path / "s"), BayesianModelAverage()]
    )
    trainer.fit(module, datamodule=Data())
    posterior = Posterior.load(tmp_path / "s")
    x, y = next(iter(DataLoader(Data().loader().dataset, 60)))
    stds = torch.stack([sample.parameters["likelihood.log_std"].exp() for sample in posterior]).double()
    assert stds.std() > 0.01, "the noise scale is sampled too"
    prediction = posterior.standardised().predict(x, return_samples=True)
    means = prediction.sample_means.double().squeeze(-1)
    components = torch.distributions.Normal(means, stds[:, None].expand_as(means))
    target = y.squeeze(-1).double()
    density = components.log_prob(target).exp().mean(0)
    cdf = components.cdf(target).mean(0)
    figures = module.evaluations["val"].bma
    assert figures["rmse"] == pytest.approx(7 * (means.mean(0) - target).square().mean().sqrt().item(), rel=1e-4)
    assert figures["nll"] == pytest.approx(-density.log().mean().item() + np.log(7), rel=1e-4)
    assert figures["coverage_90"] == pytest.approx(((cdf > 0.05) & (cdf < 0.95)).double().mean().item(), abs=1e-6)
    std = (means.var(0, correction=0) + stds.square().mean()).sqrt()
    torch.testing.assert_close(prediction.std.squeeze(-1).double(), std, rtol=1e-3, atol=1e-5)


def test_own_likelihood_and_prior(tmp_path: Path) -> None:
    class Flat(Prior):
        def log_prob(self, parameters: Any) -> Tensor:
            return torch.zeros(())

    class Poisson(BayesianModule):
        def __init__(self) -> None:
            super().__init__(prior=Flat(), sampler=SGLD, lr=0.01)
            self.rate = nn.Linear(2, 1)

        def log_likelihood(self, batch: Any) -> Tensor:
            log_rate = self.rate(batch["x"]).squeeze(-1)
            return batch["count"] * log_rate - log_rate.exp() - torch.lgamma(batch["count"] + 1)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator)
    data = [{"x": x[i], "count": torch.poisson(x[i].sum().exp(), generator=generator)} for i in range(50)]
    module = Poisson()
    trainer = quiet_trainer(max_epochs=30, callbacks=[SamplingSchedule(every_n_steps=10), BayesianModelAverage()])
    trainer.fit(module, DataLoader(data, 10), DataLoader(data, 10))  # type: ignore[arg-type]
    assert set(module.evaluations["val"].bma) == {"nll"}
    assert module.evaluations["val"].bma["nll"] < 2.5


def test_bernoulli_under_the_trainer(tmp_path: Path) -> None:
    module = BayesianModule(net=nn.Linear(2, 1), likelihood=Bernoulli(), sampler=SGHMC, lr=0.05)
    trainer = quiet_trainer(
        max_epochs=20, callbacks=[CyclicalSchedule(2, 0.5, 3), SampleCollector(in_memory=True), BayesianModelAverage()]
    )
    trainer.fit(module, *loaders())
    assert module.evaluations["val"].bma["accuracy"] > 0.8
    assert module.posterior is not None
    assert module.posterior.predict(torch.randn(5, 2)).probabilities.shape == (5, 2)  # type: ignore[union-attr]


def test_collector_thins_limits_and_moves_old_samples_aside(tmp_path: Path) -> None:
    for _ in range(2):
        collector = SampleCollector(tmp_path / "s", every_n_samples=2, max_samples=3)
        trainer = quiet_trainer(max_epochs=5, callbacks=[SamplingSchedule(every_n_steps=2), collector])
        trainer.fit(classifier(), *loaders())
        assert [r.step for r in Posterior.load(tmp_path / "s").records] == [12, 16, 20]
        assert len(list((tmp_path / "s").glob("*.safetensors"))) == 3
    assert [r.step for r in Posterior.load(tmp_path / "s-1").records] == [12, 16, 20]


def test_fast_dev_run_draws_a_sample_and_leaves_the_store_alone(tmp_path: Path) -> None:
    schedules = CyclicalSchedule(), SamplingSchedule(burn_in_epochs=3, every_n_epochs=1)
    for schedule, figures in zip(schedules, (None, ["energy", "tables"]), strict=True):
        (tmp_path / "s").mkdir(exist_ok=True)
        (tmp_path / "s" / "manifest.jsonl").write_text("real samples")
        collector = SampleCollector(tmp_path / "s")
        callbacks = [
            schedule,
            collector,
            BayesianModelAverage(),
            PosteriorDashboard("sample", figures=figures),
            RunSummary(),
        ]
        module = classifier()
        pl.Trainer(accelerator="cpu", fast_dev_run=2, enable_progress_bar=False, callbacks=callbacks).fit(
            module, *loaders()
        )
        assert module.posterior is not None
        assert len(module.posterior) >= 1
        assert (tmp_path / "s" / "manifest.jsonl").read_text() == "real samples"
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["manifest.jsonl"], "a trial run"


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    average, dashboard = BayesianModelAverage(), PosteriorDashboard(figures=["schedule"])
    callbacks = [CyclicalSchedule(1, 0.5, 2), SampleCollector(tmp_path / "s"), average, dashboard]
    for epochs in (4, 6):
        module = classifier()
        quiet_trainer(max_epochs=epochs, callbacks=callbacks, log_every_n_steps=1).fit(module, *loaders())
        assert len(module.evaluations["val"].members) == 2
        assert len(dashboard.history.scalars) == 4 * epochs
        assert dashboard.history.samples.seen == 2


def test_a_compiled_network_trains_compiled_and_is_sampled_by_its_plain_names(tmp_path: Path) -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    net = blob_network()
    module = BayesianModule(net=torch.compile(net, backend=backend), likelihood=Categorical(), sampler=SGLD, lr=0.05)  # type: ignore[arg-type]
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(tmp_path / "s"), BayesianModelAverage()]
    quiet_trainer(max_epochs=2, callbacks=callbacks).fit(module, *loaders())
    assert len(calls) == 8, "every training step ran the compiled network, and nothing else did"
    assert "net.0.weight" in Posterior.load(tmp_path / "s")[0].parameters


def test_checkpoints_can_monitor_the_average(tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val/bma_nll", filename="{step}")
    trainer = quiet_trainer(
        max_epochs=8,
        enable_checkpointing=True,
        callbacks=[CyclicalSchedule(1, 0.5, 3), BayesianModelAverage(), checkpoint],
    )
    trainer.fit(classifier(), *loaders())
    assert checkpoint.best_model_score is not None
    assert torch.isfinite(checkpoint.best_model_score)
    assert "step=" in checkpoint.best_model_path


def test_gradient_clipping_bounds_the_drift() -> None:
    module = classifier(sampler=SGLD, temperature=0.0, lr=1.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = quiet_trainer(max_steps=1, gradient_clip_val=0.01, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(module, *loaders())
    moved = sum((p.detach() - before[name]).square().sum() for name, p in module.named_parameters())
    assert torch.as_tensor(moved).sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_several_validation_loaders() -> None:
    module = classifier()
    train, val = loaders()
    others = [val, DataLoader(blobs(30, seed=4), 10)]
    callbacks = [CyclicalSchedule(1, 0.5, 2), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=6, callbacks=callbacks)
    trainer.fit(module, train, others)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = {
        name: float(value) for part in trainer.test(module, others, verbose=False) for name, value in part.items()
    }
    for index in (0, 1):
        name = f"bma_accuracy/dataloader_idx_{index}"
        assert logged[f"val/{name}"] == pytest.approx(tested[f"test/{name}"], abs=1e-6)
    assert module.evaluations["val"].bma["accuracy"] == pytest.approx(logged["val/bma_accuracy/dataloader_idx_0"])


def test_a_module_with_a_forward_of_its_own_can_be_scripted() -> None:
    class Scripted(BayesianModule):
        def __init__(self) -> None:
            super().__init__(likelihood=Gaussian())
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            output: Tensor = self.layer(x)
            return output

    module, x = Scripted(), torch.randn(2, 3)
    scripted: Any = module.to_torchscript()
    assert torch.equal(scripted(x), module(x))
