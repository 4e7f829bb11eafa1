"""The recipes on CIFAR, on small settings and on folders of images; their figures are their affair."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.recipes import __main__ as runner
from lightning_sgmcmc.recipes import cifar100_uncertainty, cifar_csghmc, cifar_csgmcmc
from lightning_sgmcmc.recipes.shared import uncertainty_methods
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.resnet import NETWORKS
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages
from lightning_sgmcmc.recipes.shared.uncertainty_methods import NETWORKS as OF_THE_PAPER
from tests.support.image_folders import write_folder

UNCERTAINTY = read_settings(cifar100_uncertainty.Settings, Options(Path(), Path()))
ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


def in_turn(function: Any, jobs: Any, options: Options, *shared: Any, **how: Any) -> dict[Any, Any]:
    """Run the jobs in this process, which has imported all that they need."""
    return {job: function(*job, *shared, options) for job in jobs}


def test_cifar_csgmcmc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [m for m in cifar_csgmcmc.METHODS if m.name in ("Snapshot-SGDM", "4×cSGHMC")]
    monkeypatch.setattr(cifar_csgmcmc, "METHODS", tuple(chosen))
    small = cifar_csgmcmc.Settings((cifar_csgmcmc.Setting("synthetic", 200, 8, 50, 0.25, 0.1, 1),), False, "32-true")
    monkeypatch.setattr(cifar_csgmcmc, "read_settings", lambda *given: small)
    images = SyntheticImages(50, 0, sizes=(200, 0, 100))
    monkeypatch.setattr(cifar_csgmcmc, "datamodule", lambda setting, settings, options: images)
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
    settings = read_settings(cifar_csgmcmc.Settings, options)
    assert (settings.compile, settings.precision, settings.folder) == ("auto", "bf16-mixed", None)
    for setting in settings.sets:
        for method in methods.values():
            schedule: Any = cifar_csgmcmc.callbacks_of(method, setting)[0]
            assert schedule.num_cycles == method.cycles
        assert setting.prior_std == pytest.approx(0.2)
        data = cifar_csgmcmc.datamodule(setting, settings, options)
        assert (data.augment, data.val_size, data.device_resident) == (True, 0, True)
    ten, hundred = settings.sets
    small = torch.nn.Linear(1, 1)

    def module_of(name: str, setting: Any) -> Any:
        return cifar_csgmcmc.module_of(methods[name], setting, settings, small)

    cold, warm = (module_of(name, ten).temperature for name in ("cSGHMC", "cSGHMC, τ=1"))
    assert (cold, warm) == (pytest.approx(2e-5), 1.0)
    assert module_of("Snapshot-SGD", ten).temperature == 0
    cyclical: Any = cifar_csgmcmc.callbacks_of(methods["cSGLD"], hundred)[0]
    assert (cyclical.num_cycles, cyclical.exploration, cyclical.samples_per_cycle) == (4, 0.94, 3)
    single: Any = cifar_csgmcmc.callbacks_of(methods["SGLD"], hundred)[0]
    assert (single.num_cycles, single.exploration, single.samples_per_cycle) == (1, 0.75, 20)
    assert methods["4×cSGHMC"].paper == (3.95, 19.19)
    assert module_of("4×cSGHMC", hundred).num_chains == 4
    quick = read_settings(cifar_csgmcmc.Settings, replace(options, full=False))
    assert settings.work / quick.work > 1e5


@pytest.mark.parametrize("method", cifar100_uncertainty.METHODS)
@pytest.mark.slow
def test_cifar100_uncertainty_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    batch = 25 if "SWAG" in method else 50  # two iterates in 15 % of a cycle
    setting = replace(UNCERTAINTY, num_data=100, num_test=100, epochs=10, batch=batch, samples=(1, 1), swag=(1, 1))
    monkeypatch.setattr(cifar100_uncertainty, "METHODS", (method,))
    monkeypatch.setattr(cifar100_uncertainty, "read_settings", lambda *given: replace(setting, seeds=1))
    monkeypatch.setattr(cifar100_uncertainty, "run_jobs", in_turn)
    rows = cifar100_uncertainty.run(Options(tmp_path, ROOT))
    values = {row.metric.removeprefix("ResNet-8: "): row.value for row in rows}
    assert len(values) == 8
    assert all(math.isfinite(value) and value >= 0 for value in values.values())
    assert 10 <= values["Brier score ×1000, out of distribution"] <= 100  # 1/K² and 1/K
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {f"{name}_ResNet-8.png" for name in ("accuracy", "nll", "entropy_ood")}
    if method == "ICSGHMC×P4":
        assert {"contour.png", "multiplier.png"} <= {
            path.name for path in (tmp_path / "ICSGHMC_P4_ResNet-8").glob("*.png")
        }


def test_cifar100_uncertainty_full_is_built() -> None:
    options = Options(Path("nowhere"), Path("nowhere"), full=True)
    setting = read_settings(cifar100_uncertainty.Settings, options)
    known, unknown = cifar100_uncertainty.datamodules(setting, options)
    assert (known.random_erasing, known.augment, known.val_size, known.batch_size) == (0.5, True, 0, 256)
    assert type(unknown).__name__ == "ResizedSVHN"
    assert setting.networks == ("ResNet-20", "ResNet-32", "ResNet-56", "WRN-16-8")
    small = torch.nn.Linear(1, 1)
    callbacks: dict[tuple[str, str], dict[str, Any]] = {}
    for name in setting.networks:
        network = OF_THE_PAPER[name]
        for method in cifar100_uncertainty.METHODS:
            module = uncertainty_methods.module_of(method, network, small, setting)
            assert module.num_chains == (1 if method.endswith("T4") else 4)
            assert module.temperature == (0 if method in ("M-SGD×P4", "cycSWAG×T4") else 3e-4)
            found = uncertainty_methods.callbacks_of(method, network, setting, unknown)
            callbacks[name, method] = {type(callback).__name__: callback for callback in found}
    assert uncertainty_methods.milestones(setting.epochs) == [250, 375]
    for name, width, start, first in (("ResNet-20", 200, 376, 374), ("WRN-16-8", 60, 401, 398)):
        contour, reduced = (callbacks[name, "ICSGHMC×P4"][c] for c in ("ContourGradient", "VarianceReducedEnergy"))
        assert contour.warm_up_steps == start * 196
        assert contour.interacting
        assert contour.step_size.at(1) == contour.step_size.at(100_000) == pytest.approx(0.003)
        assert contour.range.width == width
        assert (reduced.start_epoch, reduced.every_n_epochs) == (first, 2)
    exchange = callbacks["ResNet-20", "reSGHMC×P4"]["ReplicaExchange"]
    assert exchange.noise_variance * (1 / 3e-4 - 1 / 9e-4) == pytest.approx(4000)
    cycles = callbacks["ResNet-56", "cycSGHMC×T4"]["FlatEndedCycles"]
    assert (cycles.num_cycles, cycles.exploration, cycles.samples_per_cycle) == (10, 0.85, 12)
    swag = callbacks["ResNet-56", "cycSWAG×T4"]["SWAG"]
    assert (swag.num_cycles, swag.collection, swag.num_draws) == (10, 0.15, 10)
    assert swag.lr_factor == pytest.approx((1 + math.cos(math.pi * 0.85)) / 2)


@pytest.mark.parametrize(
    ("name", "parameters", "convolutions"),
    [("ResNet-20", 0.278e6, 21), ("ResNet-32", 0.473e6, 33), ("ResNet-56", 0.89e6, 85), ("WRN-16-8", 11.0e6, 16)],
)
def test_the_networks_have_the_published_sizes(name: str, parameters: float, convolutions: int) -> None:
    network = NETWORKS[name](100)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(parameters, rel=5e-3)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in network.modules()) == convolutions
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_the_step_sizes_of_the_uncertainty_recipe(tmp_path: Path) -> None:
    """A cosine that is flat in the sampling stage; and a fifth at each milestone."""
    import pytorch_lightning as pl

    setting = replace(UNCERTAINTY, num_data=40, num_test=20, epochs=20, batch=20, samples=(1, 1))
    options = Options(tmp_path, ROOT)
    network = OF_THE_PAPER["ResNet-8"]
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
            callbacks=[*uncertainty_methods.callbacks_of(method, network, setting, unknown), Watch()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10))
        trainer.fit(uncertainty_methods.module_of(method, network, net, setting), datamodule=known)
        if method == "M-SGD×P4":
            flat = 0.05 * (1 + math.cos(math.pi * 0.85))
            expected = [0.05 * (1 + math.cos(math.pi * k / 40)) if k < 34 else flat for k in range(40)]
        else:
            expected = [0.1] * 20 + [0.02] * 10 + [0.004] * 10
        assert seen == pytest.approx(expected)


@pytest.mark.parametrize("method", ["saM-SGD", "saCSGHMC"])
@pytest.mark.slow
def test_cifar_csghmc_runs_all_parts(tmp_path: Path, method: str) -> None:
    setting = cifar_csghmc.Setting("synthetic", 5, 1, 250, (0.02, 0.1), 5.0, 4000.0, 1)
    settings = read_settings(cifar_csghmc.Settings, Options(tmp_path, ROOT))
    best, average, worth = cifar_csghmc.one(method, 0, setting, settings, Options(tmp_path, ROOT))
    assert 0 <= best <= 100
    assert 0 <= average <= 100
    assert 1 <= worth <= 3.001


def test_cifar_csghmc_has_the_papers_setting() -> None:
    """ε and τ in the epochs of the annealed run, the prior that is the weight decay 25, all images, ten repeats."""
    options = Options(Path(), ROOT, full=True)
    settings = read_settings(cifar_csghmc.Settings, options)
    setting = settings.sets[0]
    schedule: Any = cifar_csghmc.callbacks_of("saCSGHMC", setting)[0]
    assert setting.divisor == pytest.approx(1.01)
    assert schedule.burn_in_epochs == 400
    for epoch in (0, 399, 400, 700):
        assert schedule.lr_annealing.factor(epoch) == pytest.approx(1.01 ** -max(0, epoch - 400))
        assert schedule.temperature_annealing.factor(epoch) == pytest.approx(1.01**-epoch)
    assert setting.lr == pytest.approx((50_000 * 2e-7, 50_000 * 2e-6))
    contour: Any = cifar_csghmc.callbacks_of("CSGHMC", setting)[-1]
    assert contour.step_size.at(8) == pytest.approx(10 / (8**0.75 + 1000))
    assert contour.rules.zeta * 0.01 / contour.range.width == pytest.approx(10)
    assert [type(c).__name__ for c in cifar_csghmc.callbacks_of("SGHMC", setting)].count("ContourGradient") == 0
    data = cifar_csghmc.datamodule(setting, settings, options)
    assert (data.augment, data.val_size, setting.seeds) == (True, 0, 10)
    assert (settings.compile, settings.precision) == ("auto", "bf16-mixed")


TINY = {
    "cifar_csghmc": [
        "sets=[{data: CIFAR-10, epochs: 5, every: 1, batch: 8, lr: [0.02, 0.1], width: 5, zeta: 4000, seeds: 1}]"
    ],
    "cifar_csgmcmc": [
        "sets=[{data: CIFAR-10, num_data: 1, epochs: 8, batch: 8, exploration: 0.5, friction: 0.1, seeds: 1}]"
    ],
    "cifar100_uncertainty": ["epochs=10", "batch=8", "samples=[1, 1]", "swag=[1, 1]", "seeds=1"],
}
METHODS = {"cifar_csghmc": "saCSGHMC", "cifar_csgmcmc": "cSGHMC", "cifar100_uncertainty": "ICSGHMC×P4"}


@pytest.mark.by_default("cifar_csghmc")
@pytest.mark.parametrize("recipe", TINY)
def test_a_folder_of_images(tmp_path: Path, recipe: str) -> None:
    """Each recipe runs by its command on any folder, with its number of classes and without the paper's figures."""
    images, outside, out = (tmp_path / name for name in ("images", "outside", "out"))
    write_folder(images, {"train": 12, "test": 4})
    write_folder(outside, {"other": 5}, ".jpg", classes=("pink",))
    changed = [f"folder={images}", "size=16", *TINY[recipe]]
    changed += [f"outside_folder={outside}"] if recipe == "cifar100_uncertainty" else []
    arguments = [
        recipe,
        "--out",
        str(out),
        "--data-root",
        str(tmp_path),
        "--methods",
        METHODS[recipe],
        "--repeats",
        "1",
    ]
    runner.main([*arguments, "--executor", "here", *(part for text in changed for part in ("--set", text))])
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert all(math.isfinite(row["value"]) and row["paper"] is None for row in rows)
    accuracy = [row["value"] for row in rows if "accuracy" in row["metric"]]
    assert all(round(value * 12 / 100, 6) % 1 == 0 for value in accuracy[:1]), "a share of twelve test images"
    if recipe == "cifar100_uncertainty":
        brier = next(row["value"] for row in rows if "Brier" in row["metric"])
        assert 1000 / 9 <= brier <= 1000 / 3
    else:
        assert rows[0]["metric"].startswith("images: ")


def test_a_folder_without_images_of_other_classes(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 4, "test": 2})
    setting = replace(UNCERTAINTY, folder=str(tmp_path), data=str(tmp_path))
    assert cifar100_uncertainty.datamodules(setting, Options(tmp_path, tmp_path))[1] is None


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


def test_a_store_describes_the_networks() -> None:
    from lightning_sgmcmc.posterior.description import build, describe
    from lightning_sgmcmc.recipes.shared.resnet import resnet18, resnet20_frn

    for make in (*NETWORKS.values(), resnet18, resnet20_frn):
        with torch.device("meta"):
            made = make(10)
            again = build(describe(made))
        assert [p.shape for p in again.parameters()] == [p.shape for p in made.parameters()]
