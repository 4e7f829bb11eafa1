"""Control variates in steps that are made at once: the run is the one with Lightning's loop, up to rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, NonFiniteEnergyError, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    ReplicaExchange,
    SamplingSchedule,
    VarianceReducedEnergy,
    WarmStart,
)
from lightning_sgmcmc.chains.compiled_step import CompiledSteps
from lightning_sgmcmc.chains.listed_steps import ListedSteps
from lightning_sgmcmc.contour import ContourRules
from lightning_sgmcmc.datamodules import DatasetDataModule, TensorBatches
from tests.fit.test_blocks import BOTH, DATA, FORMS, Run, counted, needs_compiler, network, x, y
from tests.fit.test_blocks_limits import Noisy


def data() -> DatasetDataModule:
    """Chains with batches of their own, and a short last batch."""
    return DatasetDataModule(DATA, batch_size=20)


def contour(**options: Any) -> ContourGradient:
    return ContourGradient(ContourRules(0.5), 40, first_edge=100.0, width=20.0, **options)


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.module.parameters()])


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "every epoch": lambda: {"callbacks": [ControlVariates()]},
    "every third epoch, later": lambda: {"callbacks": [ControlVariates(start_epoch=2, every_n_epochs=3)]},
    "plain loader": lambda: {"callbacks": [ControlVariates(every_n_epochs=2)], "data": None},
    "SGLD": lambda: {"callbacks": [ControlVariates(every_n_epochs=2)], "sampler": SGLD},
    "energies too": lambda: {"callbacks": [ControlVariates(every_n_epochs=2, energy=True)]},
    "energies alone": lambda: {"callbacks": [VarianceReducedEnergy()]},
    "two step sizes": lambda: {
        "callbacks": [ControlVariates(every_n_epochs=2)],
        "module": BayesianModule(network(), Gaussian(0.3), lr={"net.0.*": 1e-3, "*": 5e-4}, num_chains=2, seed=3),
    },
    "after a warm start": lambda: {"callbacks": [WarmStart(lr=1e-2, steps=20), ControlVariates(every_n_epochs=2)]},
}


def both(form: str, monkeypatch: pytest.MonkeyPatch, make: Callable[[], dict[str, Any]], **options: Any) -> list[Run]:
    """Return a run with blocks and one without."""
    runs = []
    for each in (form, None):
        given = {"data": data()} | make() | options
        runs.append(Run(each, monkeypatch, *given.pop("callbacks"), **given))
    return runs


@pytest.mark.by_default(
    "every epoch-1", "later-2", "loader-2", "SGLD-1", "energies too-2", "energies alone-1", "sizes-2", "warm start-1"
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_without_blocks(form: str, chains: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = counted(ListedSteps if form == "traced" else CompiledSteps, monkeypatch)
    with_blocks, without = both(form, monkeypatch, CASES[case], chains=chains, epochs=17)
    assert without.hidden == 0
    steps = with_blocks.trainer.global_step
    assert with_blocks.hidden > steps / 2
    assert sum(at_once) > steps / 3
    with_blocks.check_like(without)
    torch.testing.assert_close(parameters(with_blocks), parameters(without), rtol=1e-4, atol=1e-5)


def test_a_control_variate_changes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparisons of this file would hold without one."""
    runs = [Run("traced", monkeypatch, *own, data=data(), chains=1) for own in ([ControlVariates()], [])]
    assert (parameters(runs[0]) - parameters(runs[1])).abs().max() > 1e-3


class Held(nn.Module):
    """A network with a buffer and frozen numbers, whose output is another in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("shift", torch.tensor([0.1, 0.2, -0.3]))
        self.scale = nn.Parameter(torch.full((3,), 1.1), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs * self.scale + self.shift) * (1.0 if self.training else 0.9)  # type: ignore[no-any-return]


@pytest.mark.by_default("Noisy-2", "Held-1")
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("kind", [Held, Noisy])
def test_networks(kind: Any, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is in evaluation mode, and a network that draws numbers falls back to single steps."""
    lengths = counted(ListedSteps, monkeypatch)

    def make() -> dict[str, Any]:
        module = BayesianModule(kind(), Gaussian(0.3), lr=1e-3, num_chains=chains, seed=3)
        return {"callbacks": [ControlVariates(every_n_epochs=2, energy=True)], "module": module}

    with_blocks, without = both("traced", monkeypatch, make, epochs=20)
    assert (sum(lengths) > 50) == (kind is Held)
    with_blocks.check_like(without)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_run_that_diverges_stops_at_its_step(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(form: str | None) -> NonFiniteEnergyError:
        torch.manual_seed(0)
        module = BayesianModule(nn.Linear(3, 1), Gaussian(0.3), sampler=SGLD, lr=0.2, seed=3, num_chains=chains)
        callbacks = [SamplingSchedule(burn_in_steps=0, every_n_steps=1000), ControlVariates(every_n_epochs=4)]
        with pytest.raises(NonFiniteEnergyError) as caught:
            Run(form, monkeypatch, *callbacks, module=module, data=data(), epochs=400)
        return caught.value

    found, wanted = failure("traced"), failure(None)
    assert found.step == wanted.step > 100
    assert str(found) == str(wanted)


# -- energies ----------------------------------------------------------------------------------------------------------


ENERGIES: dict[str, Callable[[], list[pl.Callback]]] = {
    "gradients too": lambda: [ControlVariates(every_n_epochs=2, energy=True), contour()],
    "alone": lambda: [VarianceReducedEnergy(start_epoch=3), contour()],
    "without the prior": lambda: [VarianceReducedEnergy(), contour(include_prior=False)],
    "interacting": lambda: [VarianceReducedEnergy(), contour(interacting=True)],
    "of a sample's step": lambda: [VarianceReducedEnergy(), contour(sample_energy="step")],
    "in a warm-up": lambda: [
        SamplingSchedule(burn_in_steps=150, every_n_steps=5),
        VarianceReducedEnergy(),
        ContourGradient(ContourRules(0.5), 40, warm_up_steps=140),
    ],
}


@pytest.mark.parametrize("form", [*BOTH[:2], pytest.param("captured", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ENERGIES)
@pytest.mark.by_default("gradients too-traced")
def test_a_contour_reads_corrected_energies(form: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks, without = both(form, monkeypatch, lambda: {"callbacks": ENERGIES[case]()}, epochs=40)
    assert form == "traced" or with_blocks.compiled > 150
    with_blocks.check_like(without)
    mine, theirs = (run.module.contour.state for run in (with_blocks, without))
    assert torch.equal(mine.visits, theirs.visits)
    torch.testing.assert_close(mine.log_vector, theirs.log_vector, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_replicas_swap_by_corrected_energies(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> dict[str, Any]:
        exchange = ReplicaExchange([1.0, 1.1], every_n_steps=7, correction=100.0)
        return {"callbacks": [VarianceReducedEnergy(), exchange]}

    runs = both(form, monkeypatch, make, epochs=30)
    runs[0].check_like(runs[1])
    mine, theirs = (
        next(c for c in run.trainer.callbacks if isinstance(c, ReplicaExchange)).state_dict() for run in runs
    )
    assert torch.equal(mine["tally"], theirs["tally"])
    assert 0 < mine["tally"][1, 0] < mine["tally"][0, 0]
    torch.testing.assert_close(mine["variance"], theirs["variance"], rtol=1e-3, atol=1e-6)


# -- around the steps --------------------------------------------------------------------------------------------------


@pytest.mark.by_default("True-traced-2", "False-traced-1")
@pytest.mark.parametrize(
    ("form", "chains"),
    [
        ("traced", 1),
        ("traced", 2),
        *(pytest.param("compiled", n, marks=[needs_compiler, pytest.mark.slow]) for n in (1, 2)),
    ],
)
@pytest.mark.parametrize("energy", [False, True])
def test_a_resumed_run_is_the_whole_one(
    form: str, chains: int, energy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def variates() -> ControlVariates:
        return ControlVariates(every_n_epochs=3, energy=energy)

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=23, save_top_k=-1)
    options: dict[str, Any] = {"chains": chains, "epochs": 20}
    whole = Run(form, monkeypatch, variates(), keeper, data=data(), enable_checkpointing=True, **options)
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem.split("step=")[1]))
    assert len(files) == 6
    for file in (files[2], files[4]):
        resumed = Run(form, monkeypatch, variates(), data=data(), ckpt_path=file, **options)
        resumed.check_like(whole, exactly=True)


@pytest.mark.by_default("2-traced")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chains", [1, 2])
def test_logs_are_those_without_blocks(form: str, chains: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of steps that Lightning sees after they are made with others."""

    def run(form: str | None) -> tuple[Run, list[list[str]]]:
        logger = CSVLogger(tmp_path, name=str(form))
        variates = ControlVariates(every_n_epochs=2)
        made = Run(
            form, monkeypatch, variates, data=data(), chains=chains, epochs=20, logger=logger, log_every_n_steps=9
        )
        rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return made, [row.split(",") for row in rows]

    (with_blocks, rows), (without, others) = run(form), run(None)
    with_blocks.check_like(without)
    assert "sampler/gradient_evaluations" in rows[0]
    assert rows[0] == others[0]
    assert len(rows) == len(others) > 10
    for row, wanted in zip(rows[1:], others[1:], strict=True):
        for mine, theirs in zip(row, wanted, strict=True):
            assert mine == theirs or float(mine) == pytest.approx(float(theirs), rel=1e-3)


class Replaced(TensorBatches):
    """Data that change during a run."""


class Grows(pl.Callback):
    """Ten more rows at each third epoch; after that others of the same number."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        train: Any = trainer.datamodule.train  # type: ignore[attr-defined]
        if trainer.current_epoch >= 12:
            train.tensors = x[-100:] + 0.1 * (trainer.current_epoch // 3), y[-100:]
        else:
            seen = 60 + 10 * (trainer.current_epoch // 3)
            train.tensors = x[:seen], y[:seen]


@pytest.mark.by_default("2-traced")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chains", [1, 2])
def test_data_that_grow_and_change(form: str, chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> dict[str, Any]:
        batches = DatasetDataModule(Replaced(x[:60], y[:60]), batch_size=10)
        return {"callbacks": [Grows(), ControlVariates(every_n_epochs=4, energy=True)], "data": batches}

    with_blocks, without = both(form, monkeypatch, make, epochs=20, chains=chains)
    assert with_blocks.hidden > with_blocks.trainer.global_step / 2
    with_blocks.check_like(without)


@pytest.mark.by_default("2")
@pytest.mark.parametrize("chains", [1, 2])
def test_a_friction_that_compares_gradients_acts_in_each_step(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = counted(ListedSteps, monkeypatch)

    def make() -> dict[str, Any]:
        return {"callbacks": [CovarianceFriction()], "sampler": UnderdampedLangevin}

    with_blocks, without = both("traced", monkeypatch, make, chains=chains, epochs=16)
    assert with_blocks.hidden > with_blocks.trainer.global_step / 2
    assert lengths == []
    with_blocks.check_like(without)
