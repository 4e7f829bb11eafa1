"""A NaN or infinite energy: what the user reads, and that nothing of it reaches parameters, samples or checkpoints."""

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, Gaussian, NonFiniteEnergyError, Posterior
from lightning_sgmcmc.callbacks import RunSummary, SampleCollector, SamplingSchedule
from lightning_sgmcmc.fit.guard import DeferredCheck
from lightning_sgmcmc.tensors import all_finite, bad_tensor
from tests.support.trainers import quiet_trainer

COUNT, BATCH = 24, 4


def loader(bad: int | None = None, value: float = math.nan) -> DataLoader[Any]:
    """Six batches, of which the given one holds a number that is not finite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, 2, generator=generator)
    y = (x.sum(1) > 0).long()
    if bad is not None:
        x[bad * BATCH, 0] = value
    return DataLoader(TensorDataset(x, y), BATCH)


class Batches:
    """Given batches, in their order."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def module(**options: Any) -> BayesianModule:
    options = {"net": network(), "likelihood": Categorical(), "sampler": SGHMC, "lr": 0.05, "seed": 1} | options
    return BayesianModule(**options)


class States(pl.Callback):
    """Keeps the state and the sampler's behind every batch."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.steps: list[int] = []
        self.energies: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.states.append({name: t.clone() for name, t in pl_module.state_dict().items()})
        self.steps.append(pl_module.sampler.step_count)
        self.energies.append(pl_module.chains.observed.energy.item())


class BadGradient(pl.Callback):
    """Makes one entry of one gradient infinite, at one batch."""

    def __init__(self, batch: int) -> None:
        self.batch, self._seen = batch, -1

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self._seen += 1
        if self._seen == self.batch:
            pl_module.net[0].weight.grad[0, 0] = math.inf


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def finite(model: nn.Module) -> bool:
    return all(bool(t.isfinite().all()) for t in model.state_dict().values())


def checkpoints(folder: Path, every: int = 1) -> pl.callbacks.ModelCheckpoint:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)


class Logarithm(nn.Linear):
    """As of an exposure, which must not be standardised."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, :1].log()


def test_outputs_that_are_nan_at_the_start_are_no_matter_of_the_step() -> None:
    data = DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=20)
    with pytest.raises(NonFiniteEnergyError, match=r"outputs have NaN at the start's finite weights .* a standardised"):
        quiet_trainer(max_epochs=1).fit(BayesianModule(Logarithm(2, 1), Gaussian(), lr=0.01), data)


# -- stop -------------------------------------------------------------------------------------------------------------


def test_the_run_stops_before_the_update(tmp_path: Path) -> None:
    states, model = States(), module()
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "s"), states, checkpoints(tmp_path, 2)]
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    message = (
        r"the run stops before step 4 of chain 0, since the batch holds NaN or infinite numbers \(energy nan, "
        r"lr 0.05, temperature 1\); the last good checkpoint is .*step=2.ckpt; clean the data, or pass nonfinite_en"
    )
    with pytest.raises(NonFiniteEnergyError, match=message) as caught:
        trainer.fit(model, loader(bad=3))
    error = caught.value
    assert (error.step, error.chain) == (4, 0)
    assert math.isnan(error.energy)
    assert error.checkpoint == tmp_path / "step=2.ckpt"
    assert "\n" not in str(error)
    assert same(model.state_dict(), states.states[-1]), "neither parameters nor BatchNorm's statistics have moved"
    assert model.sampler.step_count == 3
    assert [r.step for r in Posterior.load(tmp_path / "s").records] == [1, 2, 3]
    pickle.dumps(model.chains.observed)
    assert model.chains.energies is None, "the module drops what only a fit needs"


def test_a_step_size_that_is_too_large(tmp_path: Path) -> None:
    """Divergence shows in the energy of the step behind the one that made it; no sample is made of what it left."""
    model = module(net=nn.Linear(2, 2), sampler=SGLD, lr=1e25)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "s"), checkpoints(tmp_path)]
    trainer = quiet_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(NonFiniteEnergyError, match=r"lr 1e\+25.*use a smaller lr, or clip the gradients") as caught:
        trainer.fit(model, loader())
    posterior = Posterior.load(tmp_path / "s")
    assert all(all_finite(list(sample.parameters.values())) for sample in posterior)
    assert 0 < caught.value.step <= 10
    for path in tmp_path.glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all_finite(list(state.values())), path


@pytest.mark.parametrize("chains", [1, 2])
def test_a_module_that_diverged_is_to_be_created_again(chains: int) -> None:
    """A smaller step does not help where it begins."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    model = BayesianModule(nn.Linear(2, 1), Gaussian(0.1), lr=10.0, num_chains=chains, seed=0)
    data = DataLoader(TensorDataset(x, x[:, :1]), batch_size=20)
    for lr, remedy in ((10.0, "use a smaller lr"), (1e-5, "create the module again")):
        model.lr = lr
        with pytest.raises(NonFiniteEnergyError, match=remedy):
            quiet_trainer(max_epochs=100, callbacks=[SamplingSchedule(every_n_steps=5)]).fit(model, data)


def test_without_checkpoints_it_says_so() -> None:
    with pytest.raises(NonFiniteEnergyError, match="there is no checkpoint to resume from; clean the data"):
        quiet_trainer(max_epochs=1).fit(module(), loader(bad=0))


def test_weights_that_begin_as_nan_are_no_fault_of_the_step() -> None:
    model = module()
    with torch.no_grad():
        model.net[0].weight[0, 0] = math.nan  # type: ignore[index, union-attr]
    with pytest.raises(NonFiniteEnergyError, match=r"'net.0.weight' is NaN or infinite at the start.*chain_start"):
        quiet_trainer(max_epochs=1).fit(model, loader())


@pytest.mark.parametrize("last", [False, True])
def test_an_infinite_gradient_of_a_finite_energy_stops_the_run(last: bool, tmp_path: Path) -> None:
    """It shows in the next step's energy, or at the end of the run."""
    model = module(sampler=SGLD)
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[BadGradient(5 if last else 2), checkpoints(tmp_path)], enable_checkpointing=True
    )
    with pytest.raises(NonFiniteEnergyError, match=r"'net.0.weight' (has become|of chain 0 holds) NaN.*smaller lr"):
        trainer.fit(model, loader())
    written = sorted(int(path.stem.split("=")[1]) for path in tmp_path.glob("*.ckpt"))
    assert written == list(range(1, 6 if last else 3)), "the poisoned state is not saved"


def test_a_sample_of_a_poisoned_state_is_not_made(tmp_path: Path) -> None:
    model = module(sampler=SGLD)
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "s"), BadGradient(3)]
    with pytest.raises(
        NonFiniteEnergyError, match=r"'net.0.weight' of chain 0 holds NaN .* step 4 .*, so it is not a valid sample"
    ):
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(model, loader())
    assert [r.step for r in Posterior.load(tmp_path / "s").records] == [1, 2, 3]


def test_a_bad_micro_batch_is_seen_under_accumulation() -> None:
    model = module()
    with pytest.raises(NonFiniteEnergyError, match="the run stops before step 2 of chain 0"):
        quiet_trainer(max_epochs=1, accumulate_grad_batches=3).fit(model, loader(bad=3))
    assert finite(model)


def test_bf16_mixed() -> None:
    with pytest.raises(NonFiniteEnergyError, match="step 3 of chain 0"):
        quiet_trainer(max_epochs=1, precision="bf16-mixed").fit(module(), loader(bad=2))


# -- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_is_left_out_without_a_trace(accumulate: int, value: float, tmp_path: Path) -> None:
    """The chain goes on as one that never had the bad batch: the same parameters, momentum, statistics and noise."""
    model, clean = module(nonfinite_energy="skip"), module(num_data=COUNT)
    states, collector = States(), SampleCollector(in_memory=True)
    callbacks = [states, SamplingSchedule(every_n_steps=1), collector]
    with pytest.warns(UserWarning, match=r"Step . is skipped since the batch holds NaN"):
        quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate, callbacks=callbacks).fit(
            model, loader(bad=3, value=value)
        )
    good = Batches([batch for i, batch in enumerate(loader()) if i // accumulate != 3 // accumulate])
    quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate).fit(clean, good)
    assert model.skipped_steps == 1
    assert model.sampler.step_count == clean.sampler.step_count == COUNT // BATCH // accumulate - 1
    assert same(model.state_dict(), clean.state_dict())
    for parameter, other in zip(model.parameters(), clean.parameters(), strict=True):
        assert same(model.sampler.state[parameter], clean.sampler.state[other])
    for noise, other in zip(model.sampler._noise.draw(), clean.sampler._noise.draw(), strict=True):
        assert torch.equal(noise, other)
    assert all(math.isfinite(energy) for energy in states.energies[accumulate - 1 :: accumulate])
    assert collector.posterior is not None
    assert [r.step for r in collector.posterior.records] == list(range(1, model.sampler.step_count + 1))


def test_a_skipped_gradient_leaves_the_state_as_it_was() -> None:
    states, model = States(), module(nonfinite_energy="skip")
    with pytest.warns(UserWarning, match=r"Step 3 is skipped since the gradient of 'net.0.weight' is not finite"):
        quiet_trainer(max_epochs=1, callbacks=[BadGradient(2), states]).fit(model, loader())
    assert states.steps == [1, 2, 2, 3, 4, 5]
    assert same(states.states[1], states.states[2])
    assert not same(states.states[2], states.states[3])


def test_too_many_in_a_row_stop_the_run() -> None:
    class Nan(BayesianModule):
        def log_likelihood(self, batch: Any) -> Tensor:
            return super().log_likelihood(batch) * (math.nan if self.trainer.global_step >= 3 else 1.0)

    options: dict[str, Any] = {"nonfinite_energy": "skip", "max_skipped_in_a_row": 5, "lr": 0.01}
    model = Nan(net=network(), likelihood=Categorical(), **options)
    message = r"the run stops before step 4 of chain 0, since the energy is nan, the 5th time in a row"
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(NonFiniteEnergyError, match=message):
        quiet_trainer(max_epochs=9).fit(model, loader())
    assert model.skipped_steps == 5


def test_skipping_does_not_help_parameters_that_are_lost() -> None:
    class Lost(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                pl_module.net[0].bias[0] = math.nan

    with pytest.raises(NonFiniteEnergyError, match=r"step 2 .* 'net.0.bias' became NaN or infinite in"):
        quiet_trainer(max_epochs=1, callbacks=[Lost()]).fit(module(nonfinite_energy="skip"), loader())


def test_the_count_is_in_the_checkpoint_the_logger_and_the_last_word(tmp_path: Path) -> None:
    def run(epochs: int, **fit: Any) -> tuple[BayesianModule, pl.Trainer]:
        model = module(nonfinite_energy="skip")
        keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        trainer = quiet_trainer(
            max_epochs=epochs,
            callbacks=[keep, SamplingSchedule(every_n_steps=1), RunSummary()],
            enable_checkpointing=True,
            logger=pl.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1),
            log_every_n_steps=1,
        )
        with pytest.warns(UserWarning, match=f"{epochs} steps were skipped because their energy"):
            trainer.fit(model, loader(bad=2), **fit)
        return model, trainer

    model, trainer = run(2)
    assert model.skipped_steps == 2
    metrics = Path(trainer.logger.log_dir, "metrics.csv").read_text()  # type: ignore[union-attr, arg-type]
    assert "sampler/skipped_steps" in metrics.splitlines()[0]
    resumed, _ = run(3, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.skipped_steps == 3
    assert resumed.sampler.step_count == 15


# -- half precision ---------------------------------------------------------------------------------------------------


def scaled(scale: float) -> pl.plugins.MixedPrecision:
    return pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_overflow_of_a_loss_scaler_is_no_fault(mode: Any) -> None:
    model = module(nonfinite_energy=mode, sampler=SGLD, lr=0.01)
    trainer = quiet_trainer(max_epochs=10, plugins=[scaled(2.0**60)])
    trainer.fit(model, loader())
    assert 0 < model.sampler.step_count < trainer.global_step
    assert model.skipped_steps == 0
    assert finite(model)


def test_a_nan_batch_under_a_loss_scaler_leaves_no_trace() -> None:
    states, model = States(), module(sampler=SGLD)
    quiet_trainer(max_epochs=1, plugins=[scaled(4.0)], callbacks=[states]).fit(model, loader(bad=2))
    assert states.steps == [1, 2, 2, 3, 4, 5]
    assert finite(model), "nor in BatchNorm's statistics"
    assert all(math.isfinite(energy) for energy in states.energies)


def test_a_scaler_that_never_steps_stops_the_run() -> None:
    class Nan(BayesianModule):
        def log_likelihood(self, batch: Any) -> Tensor:
            return super().log_likelihood(batch) * math.nan

    model = Nan(net=network(), likelihood=Categorical(), lr=0.01)
    with pytest.raises(NonFiniteEnergyError, match="the loss scaler has skipped 200 steps in a row"):
        quiet_trainer(max_epochs=99, plugins=[scaled(4.0)]).fit(model, loader())


# -- several ranks ----------------------------------------------------------------------------------------------------


class BadRank(pl.Callback):
    """One rank alone sees a NaN in its batch, at one step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            batch[0][0, 0] = math.nan


class Record(States):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        torch.save((self.steps, self.states[-1]), self.folder / f"{trainer.global_rank}.pt")

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        (self.folder / f"{trainer.global_rank}.txt").write_text(f"{type(exception).__name__} {exception}")


def fit_on_two_ranks(folder: Path, **options: Any) -> None:
    net = nn.Linear(2, 2)
    trainer = quiet_trainer(max_epochs=1, strategy="ddp_fork", devices=2, callbacks=[BadRank(), Record(folder)])
    trainer.fit(module(net=net, **options), loader())


def test_ranks_skip_alike(tmp_path: Path) -> None:
    fit_on_two_ranks(tmp_path, nonfinite_energy="skip")
    (steps, first), (steps_1, second) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert steps == steps_1 == [1, 1, 2]
    assert same(first, second)
    assert all_finite(list(first.values()))


def test_ranks_stop_alike(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="NonFiniteEnergyError"):
        fit_on_two_ranks(tmp_path)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1) if (tmp_path / f"{rank}.txt").exists()]
    assert said, "the run ends with the sentence, and does not hang"
    assert all("the run stops before step 2 of chain 0" in text for text in said)


# -- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 3, 4, 15, 16, 29])
def test_a_deferred_check_names_the_step(bad: int) -> None:
    check = DeferredCheck(2, torch.device("cpu"), interval=4)
    found = None
    for step in range(1, 31):
        values = torch.tensor([1.0, math.inf if step == bad + 1 else 2.0])
        found = check.record(values, step)
        if found:
            assert step - (bad + 1) <= 8, "seen within two intervals"
            break
    assert (found or check.drain()) == (bad + 1, 1, math.inf)


def test_a_deferred_check_of_good_numbers() -> None:
    check = DeferredCheck(1, torch.device("cpu"), interval=4)
    assert all(check.record(torch.tensor(float(k)), k) is None for k in range(30))
    assert check.drain() is None


def test_deferred_errors_name_everything(tmp_path: Path) -> None:
    """The way of a CUDA device, on a CPU."""

    class Late(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 0:
                pl_module.sampler.guard._deferred = DeferredCheck(1, torch.device("cpu"), interval=1)

    model = module(net=nn.Linear(2, 2))
    trainer = quiet_trainer(max_epochs=1, callbacks=[Late(), checkpoints(tmp_path)], enable_checkpointing=True)
    message = r"('net.weight' of chain 0 .* after step 4|energy of chain 0 was nan at step 4).*checkpoint is .*=3.ckpt"
    with pytest.raises(NonFiniteEnergyError, match=message):
        trainer.fit(model, loader(bad=3))


def test_all_finite_is_exact() -> None:
    assert all_finite([])
    assert all_finite([torch.full((4,), 3e38)]), "whose norm overflows"
    assert not all_finite([torch.zeros(3), torch.tensor([1.0, -math.inf])])
    assert not all_finite([torch.tensor([math.nan], dtype=torch.float64)])
    assert bad_tensor({}, {"mask": torch.tensor([-math.inf])}) is None
    assert bad_tensor({}, {"mean": torch.tensor([math.nan]), "count": torch.tensor(1)}) == "mean"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite_energy": "ignore"}, "nonfinite_energy must be 'stop' or 'skip', got 'ignore'"),
        ({"max_skipped_in_a_row": 0}, "max_skipped_in_a_row must be at least 1, got 0"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**options)
