"""What cannot be in a block of steps, or ends one: more than tensor operations, energies that are not finite."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Gaussian,
    NonFiniteEnergyError,
    ResumableLoader,
    UnderdampedLangevin,
)
from lightning_sgmcmc.callbacks import EWSG, ControlVariates, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule, TensorBatches
from lightning_sgmcmc.fit import blocks
from tests.fit.test_blocks import ALL, BOTH, LISTED, STEPS, Run, counted, needs_compiler, network, x, y


class Calls(nn.Module):
    """A network that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.net(inputs)  # type: ignore[no-any-return]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(nn.functional.dropout(inputs, 0.1, self.training))  # type: ignore[no-any-return]


class Annealed(BayesianModule):
    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch) * min(1.0, (1 + self.trainer.current_epoch) / 5)


FACTOR = [1.0]


class Elsewhere(BayesianModule):
    """An energy that depends on what no tensor shows."""

    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch) * FACTOR[0]

    def on_train_epoch_start(self) -> None:
        FACTOR[0] = 1.0 + 0.1 * self.trainer.current_epoch


@pytest.mark.by_default("compiled-2", "Calls-traced-2", "Noisy-traced-1", "Annealed-traced-2", "Elsewhere-traced-1")
@pytest.mark.parametrize(
    ("form", "chains"), [("traced", 2), ("traced", 1), pytest.param("compiled", 2, marks=needs_compiler)]
)
@pytest.mark.parametrize("kind", [Calls, Noisy, Annealed, Elsewhere])
def test_more_than_tensor_operations(form: str, chains: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> Run:
        FACTOR[0] = 1.0
        if issubclass(kind, BayesianModule):
            return Run(form, monkeypatch, module=kind(network(), Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3))
        return Run(form, monkeypatch, module=BayesianModule(kind(), Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3))

    run(form).check_like(run(None))


@pytest.mark.by_default("traced", "captured", "apart")
@pytest.mark.parametrize(
    "form", [*BOTH, "apart", pytest.param("compiled apart", marks=[needs_compiler, pytest.mark.slow])]
)
def test_an_energy_that_is_not_finite_stops_the_run_at_its_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2_000, 3, generator=torch.Generator().manual_seed(5))
    targets = rows[:, :1].sin()
    step = 80
    targets[ResumableLoader(TensorDataset(rows), 20, seed=3).order_of(0).indices(step - 1)[0]] = 1e30

    def failure(form: str | None) -> NonFiniteEnergyError:
        module = BayesianModule(network(), Gaussian(0.3), lr=1e-4, num_chains=2, shared_batch=True, seed=3)
        data = DatasetDataModule(TensorDataset(rows, targets), batch_size=20)
        with pytest.raises(NonFiniteEnergyError) as caught:
            Run(form, monkeypatch, SamplingSchedule(burn_in_steps=0, every_n_steps=1000), module=module, data=data)
        return caught.value

    found, wanted = failure(form), failure(None)
    assert found.step == wanted.step == step
    assert str(found) == str(wanted)


@pytest.mark.by_default("traced", "captured")
@pytest.mark.parametrize("form", BOTH)
def test_steps_of_several_epochs_are_made_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last batch of each is short; the samples and all counts are those of Lightning's own loop."""
    lengths = counted(STEPS[form], monkeypatch)
    runs = [
        Run(each, monkeypatch, SamplingSchedule(burn_in_steps=0, every_n_steps=70), chains=1, epochs=70)
        for each in (form, None)
    ]
    runs[0].check_like(runs[1])
    assert max(lengths) > 5 * runs[0].trainer.num_training_batches


@pytest.mark.by_default("traced", "captured")
@pytest.mark.parametrize("form", BOTH)
def test_a_run_that_diverges_in_such_steps_stops_at_its_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The energy overflows in a late epoch, by a step size that is too large."""

    def failure(form: str | None) -> NonFiniteEnergyError:
        torch.manual_seed(0)
        module = BayesianModule(nn.Linear(3, 1), Gaussian(0.3), sampler=SGLD, lr=0.2, seed=3)
        schedule = SamplingSchedule(burn_in_steps=0, every_n_steps=1000)
        with pytest.raises(NonFiniteEnergyError) as caught:
            Run(form, monkeypatch, schedule, module=module, epochs=400)
        return caught.value

    found, wanted = failure(form), failure(None)
    assert found.step == wanted.step > 100
    assert str(found) == str(wanted)


class Rows(Dataset[Any]):
    """Rows with a name, and inputs of a length that changes from batch to batch."""

    def __init__(self, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        if self.named:
            return {"inputs": x[index], "name": str(index)}, y[index]
        return x[index].repeat(1 + index // 5), y[index]


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor, name: Any = None) -> Tensor:
        return self.net(inputs.unflatten(-1, (-1, 3)).mean(-2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", [True, False])
def test_batches_that_are_not_tensors_of_few_shapes(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str | None) -> Run:
        module = BayesianModule(Averaged(), Gaussian(0.3), lr=1e-3, num_chains=2, seed=3)
        return Run(form, monkeypatch, module=module, data=DataLoader(Rows(named), batch_size=5))

    run("traced").check_like(run(None))


@pytest.mark.parametrize("form", ALL)
def test_data_that_grow(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(TensorBatches):
        """Ten more rows at each epoch."""

    class Grows(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen = 60 + 10 * trainer.current_epoch
            trainer.datamodule.train.tensors = x[:seen], y[:seen]  # type: ignore[attr-defined]

    def run(form: str | None) -> Run:
        data = DatasetDataModule(Growing(x[:60], y[:60]), batch_size=10)
        return Run(form, monkeypatch, Grows(), data=data, epochs=8, sampler=SGLD)

    monkeypatch.setattr("lightning_sgmcmc.fit.blocks.LAST", 1)
    with_blocks, without = run(form), run(None)
    assert with_blocks.compiled > 0 or form in LISTED
    with_blocks.check_like(without)


@pytest.mark.parametrize("cause", ["clipping", "items"])
def test_a_run_that_cannot_be_captured_goes_on_as_one_without_blocks(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a GPU's run may compile its network, as one without blocks."""
    items: Any = [(inputs, target) for inputs, target in zip(x, y, strict=True)]
    options: dict[str, Any] = {
        "clipping": {"gradient_clip_val": 0.5, "epochs": 40},
        "items": {"data": DataLoader(items, batch_size=20)},
    }[cause]
    told: list[str] = []
    monkeypatch.setattr(blocks, "rank_zero_info", told.append)
    chooses = cause == "clipping"
    captured, without = (
        Run(form, monkeypatch, *([EWSG(1)] if chooses else []), **options) for form in ("captured", None)
    )
    assert captured.compiled == 0
    assert [text for text in told if "not made in blocks" in text]
    captured.check_like(without)


class Reloads(pl.Callback):
    """Loads the sampler's own state."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 11:
            trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())


@pytest.mark.by_default("traced", "captured")
@pytest.mark.parametrize("form", BOTH)
def test_a_sampler_whose_state_is_loaded_within_a_fit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise goes on in new memory, from new generators."""
    runs = [Run(one, monkeypatch, Reloads(), epochs=16) for one in (form, None)]
    assert runs[0].hidden > 0
    runs[0].check_like(runs[1])
    samplers: list[Any] = [run.trainer.optimizers[0] for run in runs]
    states = [sampler.noise_states() for sampler in samplers]
    assert all(torch.equal(*own) for own in zip(*states, strict=True))


# -- clipped gradients -------------------------------------------------------------------------------------------------


@pytest.mark.by_default("2-1-traced", "2-2-traced")
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(
    ("algorithm", "limit", "chains", "each"), [("norm", 0.3, 2, 1), ("norm", 0.3, 1, 1), ("value", 0.05, 2, 2)]
)
def test_gradients_are_clipped_in_blocks(
    form: str, algorithm: str, limit: float, chains: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chain's by its own norm; the limit is one that most gradients reach."""
    options: dict[str, Any] = {"chains": chains, "epochs": 30, "accumulate_grad_batches": each}
    clipped = options | {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    made, without, free = (
        Run(*own, monkeypatch=monkeypatch, **given)
        for own, given in (((form,), clipped), ((None,), clipped), ((None,), options))
    )
    assert made.hidden > 50
    made.check_like(without)
    moved = [abs(mine[3] - theirs[3]).max() for mine, theirs in zip(made.samples, free.samples, strict=True)]
    assert max(moved) > 0.01


def test_variates_correct_gradients_before_they_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"epochs": 30, "gradient_clip_val": 0.3}
    made, without = (Run(form, monkeypatch, ControlVariates(), **options) for form in ("traced", None))
    assert made.hidden > 100
    made.check_like(without)


def test_many_chains_of_a_network_have_blocks() -> None:
    """By sizes as they are: 60 chains of 20,001 numbers."""
    net = nn.Sequential(nn.Linear(3, 4_000), nn.Tanh(), nn.Linear(4_000, 1))
    module = BayesianModule(net, Gaussian(0.3), sampler=SGLD, lr=1e-7, num_chains=60, seed=3)
    schedule = SamplingSchedule(burn_in_epochs=1, every_n_epochs=20)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=40, callbacks=[schedule], enable_progress_bar=False, **quiet)
    trainer.fit(module, datamodule=DatasetDataModule(TensorDataset(x[:40], y[:40]), batch_size=20))
    assert module.chains.counters.hidden_steps > 0


@needs_compiler
@pytest.mark.parametrize("form", ["compiled", pytest.param("compiled apart", marks=pytest.mark.slow)])
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["own batches", "one batch"])
def test_steps_of_many_numbers_are_compiled_with_noise_and_batches_in_place(
    form: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's normal numbers, two for each of 6,418, and its batches of up to 32,000 lie in memory of their own."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(130, 800, generator=generator)
    data = TensorDataset(inputs, inputs[:, :1] + 0.1 * torch.randn(130, 1, generator=generator))

    def run(form: str | None) -> Run:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(800, 4), nn.Tanh(), nn.Linear(4, 1))
        sampler = partial(UnderdampedLangevin, integrator="ubu")
        options: dict[str, Any] = {"lr": 1e-4, "num_chains": 2, "seed": 3, "shared_batch": not own}
        module = BayesianModule(net, Gaussian(0.3), sampler=sampler, **options)
        return Run(form, monkeypatch, module=module, data=DatasetDataModule(data, batch_size=20), epochs=20)

    made = run(form)
    assert made.compiled > 60
    made.check_like(run(None))
