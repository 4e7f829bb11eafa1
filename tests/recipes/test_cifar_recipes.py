"""The recipes of cyclical and of interacting chains on images, on small settings; their figures are their affair."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.recipes import cifar100_uncertainty, cifar_csgmcmc
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages

UNCERTAINTY = read_settings(cifar100_uncertainty.Settings, Options(Path(), Path()))
ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


def in_turn(function: Any, jobs: Any, options: Options, *shared: Any, **how: Any) -> dict[Any, Any]:
    """Run the jobs in this process, which has imported all that they need."""
    return {job: function(*job, *shared, options) for job in jobs}


def test_cifar_csgmcmc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [m for m in cifar_csgmcmc.METHODS if m.name in ("Snapshot-SGDM", "4×cSGHMC")]
    monkeypatch.setattr(cifar_csgmcmc, "METHODS", tuple(chosen))
    small = cifar_csgmcmc.Settings((cifar_csgmcmc.Setting("synthetic", 200, 8, 50, 0.25, 0.1, 1),))
    monkeypatch.setattr(cifar_csgmcmc, "read_settings", lambda *given: small)
    images = SyntheticImages(50, 0, sizes=(200, 0, 100))
    monkeypatch.setattr(cifar_csgmcmc, "datamodule", lambda setting, options: images)
    monkeypatch.setattr(cifar_csgmcmc, "run_jobs", in_turn)
    rows = cifar_csgmcmc.run(Options(tmp_path, ROOT))
    assert [row.method for row in rows[::3]] == ["Snapshot-SGDM", "4×cSGHMC"]
    assert all(0 <= row.value <= 100 for row in rows)
    assert all(row.paper is None for row in rows)
    assert (tmp_path / "errors_synthetic.png").exists()
    names = {path.name for path in (tmp_path / "4_cSGHMC_synthetic").glob("*.png")}
    assert names >= {"geometry.png", "schedule.png", "test_segments.png", "test_running.png"}


def test_cifar_csgmcmc_full_is_built() -> None:
    """Settings of the paper: the noise's share of the run, the samples, the temperature and the prior."""
    options = Options(Path("nowhere"), Path("nowhere"), full=True)
    methods = {method.name: method for method in cifar_csgmcmc.METHODS}
    sets = read_settings(cifar_csgmcmc.Settings, options).sets
    for setting in sets:
        for method in methods.values():
            schedule: Any = cifar_csgmcmc.callbacks_of(method, setting)[0]
            assert schedule.num_cycles == method.cycles
        assert setting.prior_std == pytest.approx(0.2)
        data = cifar_csgmcmc.datamodule(setting, options)
        assert (data.augment, data.val_size, data.device_resident) == (True, 0, True)
    ten, hundred = sets
    cold, warm = (cifar_csgmcmc.module_of(methods[n], ten, options).temperature for n in ("cSGHMC", "cSGHMC, τ=1"))
    assert (cold, warm) == (pytest.approx(2e-5), 1.0)
    assert cifar_csgmcmc.module_of(methods["Snapshot-SGD"], ten, options).temperature == 0
    cyclical: Any = cifar_csgmcmc.callbacks_of(methods["cSGLD"], hundred)[0]
    assert (cyclical.num_cycles, cyclical.exploration, cyclical.samples_per_cycle) == (4, 0.94, 3)
    single: Any = cifar_csgmcmc.callbacks_of(methods["SGLD"], hundred)[0]
    assert (single.num_cycles, single.exploration, single.samples_per_cycle) == (1, 0.75, 20)
    assert methods["4×cSGHMC"].paper == (3.95, 19.19)
    assert cifar_csgmcmc.module_of(methods["4×cSGHMC"], hundred, options).num_chains == 4


@pytest.mark.parametrize("method", cifar100_uncertainty.METHODS)
def test_cifar100_uncertainty_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    setting = replace(UNCERTAINTY, num_data=100, num_test=100, epochs=10, batch=50, samples=(1, 1))
    monkeypatch.setattr(cifar100_uncertainty, "METHODS", (method,))
    monkeypatch.setattr(cifar100_uncertainty, "read_settings", lambda *given: replace(setting, seeds=1))
    monkeypatch.setattr(cifar100_uncertainty, "run_jobs", in_turn)
    rows = cifar100_uncertainty.run(Options(tmp_path, ROOT))
    values = {row.metric: row.value for row in rows}
    assert len(values) == 8
    assert all(math.isfinite(value) and value >= 0 for value in values.values())
    assert 10 <= values["Brier score ×1000, out of distribution"] <= 100  # 1/K² and 1/K
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"accuracy.png", "nll.png", "entropy_ood.png"}
    if method == "ICSGHMC×P4":
        assert {"contour.png", "multiplier.png"} <= {path.name for path in (tmp_path / "ICSGHMC_P4").glob("*.png")}


def test_cifar100_uncertainty_full_is_built() -> None:
    options = Options(Path("nowhere"), Path("nowhere"), full=True)
    setting = read_settings(cifar100_uncertainty.Settings, options)
    known, unknown = cifar100_uncertainty.datamodules(setting, options)
    assert (known.random_erasing, known.augment, known.val_size, known.batch_size) == (0.5, True, 0, 256)
    assert unknown.transform() is known.transform()
    assert setting.milestones == [250, 375]
    assert setting.prior_std == pytest.approx(0.2)
    callbacks = {}
    for method in cifar100_uncertainty.METHODS:
        module = cifar100_uncertainty.module_of(method, setting, options)
        assert module.num_chains == (1 if method.endswith("T4") else 4)
        assert module.temperature == (0 if method == "M-SGD×P4" else 3e-4)
        assert sum(p.numel() for p in module.parameters()) == 275_572
        found: list[Any] = cifar100_uncertainty.callbacks_of(method, setting, unknown)
        callbacks[method] = {type(callback).__name__: callback for callback in found}
    contour, reduced = (callbacks["ICSGHMC×P4"][name] for name in ("ContourGradient", "VarianceReducedEnergy"))
    assert contour.warm_up_steps == 376 * 196
    assert contour.interacting
    assert contour.step_size.at(1) == contour.step_size.at(100_000) == pytest.approx(0.003)
    assert contour.rules.zeta * 3e-4 / contour.range.width == pytest.approx(4.5)
    assert (reduced.start_epoch, reduced.every_n_epochs) == (374, 2)
    exchange = callbacks["reSGHMC×P4"]["ReplicaExchange"]
    assert exchange.noise_variance * (1 / 3e-4 - 1 / 9e-4) == pytest.approx(4000)
    cycles = callbacks["cycSGHMC×T4"]["FlatEndedCycles"]
    assert (cycles.num_cycles, cycles.exploration, cycles.samples_per_cycle) == (10, 0.85, 12)


def test_the_step_sizes_of_the_uncertainty_recipe(tmp_path: Path) -> None:
    """A cosine that is flat in the sampling stage; and a fifth at each milestone."""
    import pytorch_lightning as pl

    setting = replace(UNCERTAINTY, num_data=40, num_test=20, epochs=20, batch=20, samples=(1, 1))
    options = Options(tmp_path, ROOT)
    seen: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            seen.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    for method in ("M-SGD×P4", "reSGHMC×P4"):
        seen.clear()
        known, unknown = cifar100_uncertainty.datamodules(setting, options)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=20,
            callbacks=[*cifar100_uncertainty.callbacks_of(method, setting, unknown), Watch()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(cifar100_uncertainty.module_of(method, setting, options), datamodule=known)
        if method == "M-SGD×P4":
            flat = 0.05 * (1 + math.cos(math.pi * 0.85))
            expected = [0.05 * (1 + math.cos(math.pi * k / 40)) if k < 34 else flat for k in range(40)]
        else:
            expected = [0.1] * 20 + [0.02] * 10 + [0.004] * 10
        assert seen == pytest.approx(expected)


def test_synthetic_images() -> None:
    """Two data sets of one seed share nothing but their noise's law; patterns have the asked strength."""
    known, unknown = (SyntheticImages(10, 3, strength=2.0, sizes=(400, 0, 50), unknown=u) for u in (False, True))
    means = []
    for data in (known, unknown):
        data.setup("fit")
        images, labels = data.splits[0].inputs, data.splits[0].targets
        assert images.shape == (400, 3, 16, 16)
        assert images.var() == pytest.approx(1 + 2.0**2, rel=0.3)
        means.append(torch.stack([images[labels == k].mean((0, 2, 3)) for k in range(10)]))
    assert torch.corrcoef(torch.stack([m.flatten() for m in means]))[0, 1].abs() < 0.8
    again = SyntheticImages(10, 3, strength=2.0, sizes=(400, 0, 50))
    again.setup("fit")
    assert torch.equal(again.splits[0].inputs, known.splits[0].inputs)


def test_resnet18() -> None:
    from lightning_sgmcmc.recipes.shared.resnet import resnet18

    assert sum(p.numel() for p in resnet18(10).parameters()) == 11_173_962
    assert resnet18(100, width=4)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
