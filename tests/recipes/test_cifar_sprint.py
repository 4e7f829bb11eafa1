"""The recipe `cifar_sprint`: its network, its clock, its averages, and the whole of it on small settings."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc.recipes import __main__ as runner
from lightning_sgmcmc.recipes import cifar_sprint
from lightning_sgmcmc.recipes.cifar_sprint import NEAR, NLL, REACHED, fits
from lightning_sgmcmc.recipes.cifar_sprint.clock import UNTIMED, Clock
from lightning_sgmcmc.recipes.cifar_sprint.network import Normalised, SprintNetwork, whitening_filters
from lightning_sgmcmc.recipes.cifar_sprint.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from tests.support.image_folders import write_folder

QUICK = read_settings(Settings, Options(Path(), Path()))
SMALL = replace(
    QUICK,
    num_data=100,
    num_test=60,
    chains=(2,),
    epochs=24,
    lengths=(0.5, 1.0),
    cycles=2,
    exploration=0.5,
    samples=2,
    batch=50,
    filters=4,
    widths=(4, 4, 4),
    seeds=1,
)


def images(count: int, seed: int = 0) -> torch.Tensor:
    """Return smooth random images, whose neighbouring pixels are correlated."""
    noise = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool2d(noise, 3, 1)


def test_whitened_patches_are_uncorrelated() -> None:
    """The responses' covariance is the identity, but for what is added to small variances (here below 2 %)."""
    x = images(400)
    filters = whitening_filters(x, 12, 3)
    assert torch.equal(filters[6:], -filters[:6])
    responses = nn.functional.conv2d(x, filters[:6]).transpose(0, 1).flatten(1)
    assert torch.allclose(responses.cov(), torch.eye(6), atol=0.02)
    raw = x.unfold(2, 3, 1).unfold(3, 3, 1).permute(1, 4, 5, 0, 2, 3).reshape(27, -1)
    assert raw.corrcoef().fill_diagonal_(0).abs().max() > 0.5


@pytest.mark.parametrize("count", [0, 3, 56])
def test_a_wrong_number_of_filters(count: int) -> None:
    with pytest.raises(ValueError, match=f"even number up to 54 for patches of 3 pixels, got {count}"):
        whitening_filters(images(10), count, 3)


def test_the_prediction_for_an_image_depends_on_no_other_image_and_no_scale() -> None:
    """In training mode too; and the lengths of the convolutions' weights do not matter."""
    torch.manual_seed(0)
    x = images(8)
    network = SprintNetwork(5, whitening_filters(x, 8, 3), (4, 8, 8), groups=2, scale=0.5).train()
    together = network(x)
    assert together.std(0).min() > 1e-3
    assert torch.allclose(torch.cat([network(one[None]) for one in x]), together, atol=1e-5)
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == ["filters"]
    assert not list(network.buffers())
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, nn.Conv2d):
                part.weight.mul_(3)
    assert torch.allclose(network(x), together, atol=1e-3)


def test_the_normalisation_by_hand() -> None:
    layer = Normalised(4, 2)
    x = 3 + 2 * torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    groups = layer(x).detach().view(5, 2, -1)
    assert groups.mean(2).abs().max() < 1e-5
    assert torch.allclose(groups.var(2, correction=0), torch.ones(5, 2), atol=1e-4)


def test_every_number_of_chains_has_the_same_budget() -> None:
    data: Any = SimpleNamespace(num_data=QUICK.num_data)
    options = Options(Path(), Path())
    for length in QUICK.lengths:
        alone, four = (fits.steps_of(chains, length, data, QUICK, options) for chains in (1, 4))
        assert alone == 4 * four == pytest.approx(length * QUICK.epochs * QUICK.num_data / QUICK.batch)


def test_a_budget_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps fill the seconds at the speed that a trial measures, and a trial measures one."""
    options = Options(tmp_path, tmp_path)
    timed = replace(SMALL, epochs=None, seconds=30.0)
    assert 1e-5 < fits.seconds_of_a_step(1, timed, options) < 10
    monkeypatch.setattr(fits, "seconds_of_a_step", lambda chains, *given: 0.01 * chains)
    data: Any = SimpleNamespace(num_data=100)
    assert fits.steps_of(2, 0.5, data, timed, options) == 750


def test_a_budget_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"the budget is epochs or seconds, got epochs=24 and seconds=60.0"):
        replace(SMALL, seconds=60.0)
    with pytest.raises(ValueError, match=r"one of them 1, got \(0.5,\)"):
        replace(SMALL, lengths=(0.5,))
    with pytest.raises(ValueError, match="burn_in"):
        replace(SMALL, burn_in=1.0)


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten steps take ten seconds each and count one as the others; a continued fit adds its own."""
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    trainer: Any = None
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    clock = Clock()
    clock.reset()
    clock.on_train_start(trainer, module)
    for step in range(UNTIMED + 20):
        now[0] += 10.0 if step < UNTIMED else 1.0
        clock.on_train_batch_end(trainer, module)
        if step == UNTIMED + 9:
            clock.on_posterior_samples(trainer, module, None)
    assert (clock.seconds, clock.drawn) == (pytest.approx(UNTIMED + 20), [pytest.approx(UNTIMED + 10)])
    other = Clock()
    other.reset()
    other.load_state_dict(clock.state_dict())
    now[0] += 1000.0  # between two attempts
    other.on_train_start(trainer, module)
    now[0] += 1.0
    other.on_train_batch_end(trainer, module)
    assert other.seconds == pytest.approx(UNTIMED + 21)


def test_the_newest_draws() -> None:
    assert [len(fits.newest(list(range(count)), 0.5)) for count in (1, 2, 3, 4, 12)] == [1, 1, 2, 2, 6]
    assert fits.newest([1, 2, 3], 0.0) == [1, 2, 3]


def test_the_time_to_a_nll() -> None:
    curve = [(1.0, {NLL: 0.5}), (2.0, {NLL: 0.3}), (3.0, {NLL: 0.2})]
    assert cifar_sprint.first_time(curve, 0.3) == 2.0
    assert cifar_sprint.first_time(curve, 0.1) is None


def test_the_averages_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a burn-in the figures after each drawing are those of `BayesianModelAverage`, ECE and AUROC too."""
    from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector

    options = Options(tmp_path, tmp_path)
    data, unknown = fits.datamodules(SMALL, options)
    data.setup("fit")
    torch.manual_seed(0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # else the chains' seed is of the system
    module = fits.module_of("chains", 2, data, SMALL)
    average = BayesianModelAverage(ood={"other": unknown})
    callbacks = [fits.schedule_of("chains", SMALL), SampleCollector(in_memory=True), average]
    trainer = fits.trainer_of(callbacks, 20, SMALL, options)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    running = module.evaluations["test"].running[1::2]
    ours = fits.figures_of_draws(module, data, unknown, 0.0, torch.device("cpu"))
    assert len(ours) == len(running) == 4
    for own, theirs in zip(ours, running, strict=True):
        expected = (100 * (1 - theirs["accuracy"]), theirs["nll"], theirs["ece"], theirs["ood_other_auroc"])
        assert list(own.values()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    last = fits.figures_of_draws(module, data, unknown, 0.5, torch.device("cpu"))[-1]
    assert last[NLL] != pytest.approx(ours[-1][NLL], rel=1e-5), "the older half of the draws counts no more"


def test_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods: as many points as drawings, equal steps, and the differences of the figures."""
    seen: dict[Any, Any] = {}

    def in_turn(function: Any, jobs: Any, options: Options, *shared: Any, **how: Any) -> dict[Any, Any]:
        seen.update({job: function(*job, *shared, options) for job in jobs})
        return seen

    monkeypatch.setattr(cifar_sprint, "read_settings", lambda *given: SMALL)
    monkeypatch.setattr(cifar_sprint, "run_jobs", in_turn)
    rows = cifar_sprint.run(Options(tmp_path, tmp_path))
    assert {len(found["curve"]) for job, found in seen.items() if job[0] in fits.CYCLICAL} == {4}
    assert {len(found["curve"]) for job, found in seen.items() if job[0] not in fits.CYCLICAL} == {1}
    assert {job[0]: found["steps"] for job, found in seen.items()} == {
        "chains": 24,
        "snapshots": 24,
        "ensemble": 24,
        "network": 48,
    }
    value = {(row.method, row.metric): row.value for row in rows}
    for metric in ("error %", NLL, "ECE", "AUROC, out of distribution"):
        assert value["chains ×2 - ensemble ×2", metric] == pytest.approx(
            value["chains ×2", metric] - value["ensemble ×2", metric]
        )
    assert [value[f"{name} ×2", "networks in a prediction"] for name in ("chains", "ensemble")] == [4, 2]
    assert value["one network", REACHED] == 1
    assert value["one network", NEAR] <= value["one network", "seconds of training"] * 1.0001
    assert (tmp_path / "curves.png").exists()


def test_the_same_start_and_other_noise() -> None:
    """Chains differ from snapshots by their temperature only."""
    data: Any = SimpleNamespace(splits=[SimpleNamespace(inputs=images(20))], transform=lambda: None, num_classes=3)
    temperatures = []
    for method in ("chains", "snapshots", "ensemble"):
        temperatures.append(fits.module_of(method, 2, data, SMALL).temperature)
    assert temperatures == [SMALL.temperature, 0.0, 0.0]
    cycles: Any = fits.schedule_of("snapshots", SMALL)
    assert (cycles.num_cycles, cycles.exploration, cycles.samples_per_cycle) == (2, 0.5, 2)


def test_a_folder_of_images(tmp_path: Path) -> None:
    """The recipe runs by its command on any folder, with its number of classes, against another folder."""
    known, outside, out = (tmp_path / name for name in ("images", "outside", "out"))
    write_folder(known, {"train": 20, "test": 4})
    write_folder(outside, {"other": 5}, ".jpg", classes=("pink",))
    changed = [f"folder={known}", f"outside_folder={outside}", "epochs=24", "chains=[2]", "lengths=[1]", "batch=30"]
    changed += ["cycles=1", "samples=1", "widths=[4, 4, 4]", "filters=4", "augment=true"]
    arguments = ["cifar_sprint", "--out", str(out), "--data-root", str(tmp_path), "--repeats", "1"]
    arguments += ["--methods", "chains,network"]
    runner.main([*arguments, "--executor", "here", *(part for text in changed for part in ("--set", text))])
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert all(math.isfinite(row["value"]) and row["paper"] is None for row in rows)
    errors = {row["method"]: row["value"] for row in rows if row["metric"] == "error %" and "-" not in row["method"]}
    assert errors.keys() == {"chains ×2", "one network"}
    assert all(round(value * 12 / 100, 4) % 1 == 0 for value in errors.values()), "shares of twelve test images"


def test_full_is_built() -> None:
    options = Options(Path("nowhere"), Path("nowhere"), full=True)
    settings = read_settings(Settings, options)
    known, unknown = fits.datamodules(settings, options)
    assert (known.augment, known.val_size, known.device_resident) == (True, 0, True)
    assert type(unknown).__name__ == "ResizedSVHN"
    assert (settings.compile, settings.precision, settings.seconds, settings.chains) == (
        "auto",
        "bf16-mixed",
        60,
        (4, 8, 16),
    )
    assert 50_000 % settings.batch == 0, "a smaller last batch would be compiled anew"
    network = SprintNetwork(
        10, torch.empty(settings.filters, 3, 3, 3), settings.widths, settings.groups, settings.scale
    )
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
