"""What the dashboard draws, when, from what, and what it leaves alone."""

import copy
import csv
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior, Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.callbacks.posterior_dashboard import PARTS
from lightning_sgmcmc.diagnostics.geometry import interpolate, squared_distances
from lightning_sgmcmc.figures import logging as logger_output
from lightning_sgmcmc.report import pictures as dashboard_parts
from tests.support.problems import Blobs, classifier, loaders
from tests.support.recorders import Each
from tests.support.trainers import StopAt, quiet_trainer


class Steps(pl.loggers.CSVLogger):
    """Also keeps the steps at which a scalar came."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: dict[str, list[int]] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        for name in metrics:
            self.steps.setdefault(name, []).append(int(step or 0))
        super().log_metrics(metrics, step)


def drawn_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Return, filled as the run goes on, the steps at which each figure was drawn."""
    steps: dict[str, list[int]] = {}

    def record(trainer: Any, name: str, figure: Any, step: int, *others: Any) -> None:
        steps.setdefault(name, []).append(step)

    monkeypatch.setattr("lightning_sgmcmc.callbacks.posterior_dashboard.log_figure", record)
    return steps


def run_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": "cycle"}, [14, 28, 40]),
        ({"every": "end"}, [40]),
        ({"every": "sample"}, [12, 14, 26, 28, 39, 40]),
        ({"every": "sample", "every_n_samples": 4}, [28, 40]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_when_it_draws(monkeypatch: pytest.MonkeyPatch, options: Any, expected: list[int], first: bool) -> None:
    """Three cycles with samples at 12, 14, 26, 28, 39, 40; the last ones are drawn by the end of the fit."""
    steps = drawn_at(monkeypatch)
    dashboard = PosteriorDashboard(figures=["schedule"], **options)
    callbacks = [dashboard, CyclicalSchedule(3, 0.6, 2)]
    quiet_trainer(max_epochs=10, callbacks=callbacks if first else callbacks[::-1]).fit(classifier(), *loaders())
    assert steps == {"posterior/schedule": expected}


def test_without_cycles_it_draws_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = drawn_at(monkeypatch)
    callbacks = [SamplingSchedule(every_n_steps=3), PosteriorDashboard(figures=["schedule"])]
    quiet_trainer(max_epochs=3, callbacks=callbacks).fit(classifier(), *loaders())
    assert steps == {"posterior/schedule": [12]}


def test_scalars_come_at_the_logged_optimizer_steps_only(tmp_path: Path) -> None:
    logger = Steps(tmp_path)
    callbacks = [SamplingSchedule(every_n_steps=5), PosteriorDashboard(figures=())]
    trainer = quiet_trainer(
        max_epochs=6, logger=logger, log_every_n_steps=4, accumulate_grad_batches=2, callbacks=callbacks
    )
    trainer.fit(classifier(), *loaders())
    assert logger.steps["sampler/energy"] == [1, 4, 8, 12]
    assert logger.steps["samples/count"] == [5, 10]
    assert "samples/weight_efficiency" not in logger.steps, "all weights are equal"
    assert "sampler/gradient_multiplier" not in logger.steps
    history = json.loads((Path(logger.log_dir) / "history.json").read_text())
    assert history["steps"] == [1, 4, 8, 12]
    assert [len(history["traces"]), *map(len, history["traces"].values())] == [7, 4, 4, 4, 4, 4, 4, 4]


class Controls(SamplerCallback):
    """Keeps step size and temperature of each step."""

    def begin(self, run: Any, saved: dict[str, Any] | None) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        group = self.run.sampler.param_groups[0]
        self.seen.append((float(group["lr"]), float(group["temperature"])))


def test_the_schedule_is_drawn_as_it_was_however_rarely_it_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "lightning_sgmcmc.callbacks.posterior_dashboard.log_figure",
        lambda trainer, name, figure, *others: drawn.update({name: figure}),
    )
    controls, logger = Controls(), Steps(tmp_path)
    dashboard = PosteriorDashboard("end", figures=["schedule"])
    callbacks = [CyclicalSchedule(2, 0.5, 2), SampleCollector(in_memory=True), controls, dashboard]
    trainer = quiet_trainer(max_epochs=5, callbacks=callbacks, log_every_n_steps=50, logger=logger)
    module = classifier()
    trainer.fit(module, *loaders())
    upper, lower = drawn["posterior/schedule"].axes
    for axes, place in ((upper, 0), (lower, 1)):
        line = axes.lines[0]
        assert line.get_xdata().tolist() == list(range(1, 21))
        assert line.get_ydata() == pytest.approx([row[place] for row in controls.seen])
    steps = [record.step for record in module.posterior.records]
    assert upper.lines[1].get_xdata().tolist() == steps == [8, 10, 18, 20]
    assert upper.lines[1].get_ydata() == pytest.approx([controls.seen[step - 1][0] for step in steps])
    assert dashboard.history.cycles == [(1, 10), (11, 20)]
    assert logger.steps["sampler/temperature"] == [1, *steps], "logged points alone would miss the samples' temperature"


def test_figures_for_print_are_in_two_files() -> None:
    callbacks = [SamplingSchedule(every_n_steps=4), PosteriorDashboard(figures=["schedule"], for_print=True)]
    quiet_trainer(max_epochs=1, callbacks=callbacks).fit(classifier(), *loaders())
    assert Path("sgmcmc/schedule.pdf").read_bytes().startswith(b"%PDF")
    assert Image.open("sgmcmc/schedule.png").info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_traces_are_the_weights_that_they_name(tmp_path: Path) -> None:
    module, dashboard = classifier(prior=GaussianPrior(2.0)), PosteriorDashboard(figures=["traces"])
    norms: list[float] = []
    losses: list[float] = []

    class Squares(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
            norms.append(torch.cat([p.flatten() for p in module.parameters()]).square().mean().item() / 4)
            x, y = batch
            losses.append(nn.functional.cross_entropy(copy.deepcopy(module)(x), y).item())

    callbacks = [SamplingSchedule(every_n_steps=5), dashboard, Squares()]
    quiet_trainer(max_epochs=2, log_every_n_steps=1, callbacks=callbacks).fit(module, *loaders())
    parameters = dict(module.named_parameters())
    *weights, norm, nll, cycle = dashboard.history.trace_names
    assert dashboard.history.scalar(nll) == pytest.approx(losses, rel=1e-4), "without the prior's constant"
    assert set(dashboard.history.scalar(cycle)) == {0}
    assert dashboard.history.scalar(norm) == pytest.approx(norms, rel=1e-4)
    for label in weights:
        name, _, index = label.rstrip("]").partition("[")
        place = tuple(int(i) for i in index.split(","))
        assert dashboard.history.scalar(label)[-1] == pytest.approx(parameters[name][place].item())
        assert len(set(dashboard.history.scalar(label))) == 8


def test_segments_are_evaluated_like_samples_and_their_ends_are_the_samples(tmp_path: Path) -> None:
    """The network has BatchNorm, so the running statistics in between count."""
    module = classifier(dropout=0.3)
    collector, average = SampleCollector(tmp_path / "s"), BayesianModelAverage()
    dashboard = PosteriorDashboard(figures=["segments"], segment_points=5)
    train, val = loaders()
    trainer = quiet_trainer(max_epochs=10, callbacks=[CyclicalSchedule(2, 0.5, 2), collector, average, dashboard])
    trainer.fit(module, train, val)
    members = module.evaluations["val"].members
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    segments = dashboard._segments.walk(trainer, module, module.posterior, "val")
    assert [kind for kind, _, _ in segments] == ["within a cycle", "within a cycle", "between cycles"]
    for (_, _, values), (first, second) in zip(segments, [(0, 1), (2, 3), (1, 3)], strict=True):
        for place, member in ((0, members[first]), (-1, members[second])):
            assert values["error"][place] == pytest.approx(1 - member["accuracy"], abs=1e-6)
            assert values["NLL (nats per example)"][place] == pytest.approx(member["nll"], rel=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    posterior = Posterior.load(tmp_path / "s")
    module.load_state_dict(interpolate(posterior[1].state, posterior[3].state, 0.25))
    module.eval()
    x, y = val.dataset.tensors  # type: ignore[attr-defined]
    nll = nn.functional.cross_entropy(module(x), y).item()
    assert segments[2][2]["NLL (nats per example)"][1] == pytest.approx(nll, rel=1e-5)


def test_the_geometry_is_that_of_the_samples(tmp_path: Path) -> None:
    dashboard = PosteriorDashboard(figures=["geometry"])
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path / "s"), dashboard]
    quiet_trainer(max_epochs=4, callbacks=callbacks).fit(classifier(), *loaders())
    flat = torch.stack(
        [torch.cat([p.flatten() for p in s.parameters.values()]) for s in Posterior.load(tmp_path / "s")]
    )
    sketches = dashboard.history.sketches.tensor()[:, 2:]
    torch.testing.assert_close(squared_distances(sketches), squared_distances(flat))


def test_a_resumed_run_has_the_whole_history(tmp_path: Path) -> None:
    histories = []
    for name, stop in (("whole", None), ("cut", 7)):
        callbacks: list[pl.Callback] = [
            CyclicalSchedule(2, 0.5, 2),
            PosteriorDashboard(figures=["tables"]),
            BayesianModelAverage(),
        ]
        options: dict[str, Any] = {"max_epochs": 10, "log_every_n_steps": 1}
        if stop is not None:
            trainer = quiet_trainer(callbacks=[*callbacks, StopAt(stop)], **options)
            trainer.fit(classifier(), *loaders())
            trainer.save_checkpoint(tmp_path / "last.ckpt")
            callbacks = [CyclicalSchedule(2, 0.5, 2), PosteriorDashboard(figures=["tables"]), BayesianModelAverage()]
        logger = pl.loggers.CSVLogger(tmp_path, name)
        trainer = quiet_trainer(callbacks=callbacks, logger=logger, **options)
        trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "last.ckpt" if stop is not None else None)
        histories.append(json.loads((Path(logger.log_dir) / "history.json").read_text()))
    whole, cut = histories
    assert cut["steps"] == list(range(1, 41))
    assert len(cut["samples"]) == 4
    assert cut == whole


class Fails(SamplerCallback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 9:
            raise RuntimeError("the power is out")


def test_a_run_that_breaks_leaves_its_history() -> None:
    callbacks = [SamplingSchedule(every_n_steps=4), PosteriorDashboard(), Fails()]
    trainer = quiet_trainer(max_epochs=10, log_every_n_steps=3, callbacks=callbacks)
    with pytest.raises(RuntimeError, match="the power is out"):
        trainer.fit(classifier(), *loaders())
    history = json.loads(Path("sgmcmc/history.json").read_text())
    assert history["steps"] == [1, 3, 6, 9]
    assert [sample["step"] for sample in history["samples"]] == [4, 8]


def test_an_error_while_drawing_is_one_warning_and_the_rest_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: Any) -> Any:
        raise RuntimeError("no such font")

    monkeypatch.setattr(dashboard_parts, "energy", broken)
    callbacks = [CyclicalSchedule(3, 0.5, 2), PosteriorDashboard(figures=["energy", "geometry"])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_epochs=10, callbacks=callbacks).fit(classifier(), *loaders())
    ours = [str(w.message) for w in caught if "PosteriorDashboard" in str(w.message)]
    assert ours == [
        "PosteriorDashboard could not draw 'energy' (RuntimeError: no such font); the run continues without it."
    ]
    assert run_files(Path("sgmcmc")) == {"geometry.png", "history.json"}


def test_a_full_disk_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger_output, "write_output", full)
    monkeypatch.setattr("lightning_sgmcmc.callbacks.posterior_dashboard.write_output", full)
    module = classifier()
    callbacks = [
        CyclicalSchedule(1, 0.5, 2),
        PosteriorDashboard(figures=["schedule", "energy", "segments", "tables"]),
        BayesianModelAverage(),
    ]
    trainer = quiet_trainer(max_epochs=5, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders())
    ours = [str(w.message) for w in caught if "PosteriorDashboard" in str(w.message)]
    assert len(ours) == 1, "one reason is one warning"
    assert "could not draw 'schedule' (OSError: [Errno 28] No space left on device)" in ours[0]
    assert trainer.global_step == 20
    assert len(module.evaluations["val"].members) == 2


def regression_data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    x = torch.linspace(-1, 1, 48)[:, None]
    data = TensorDataset(x, x**2)
    return DataLoader(data, 12), DataLoader(data, 16)


class OwnLikelihood(BayesianModule):
    """A density of its own, without a likelihood object."""

    def log_likelihood(self, batch: Any) -> Tensor:
        x, y = batch
        return -(self(x) - y).square().sum(-1)


CHAIN = {
    *(f"{name}.png" for name in ("schedule", "energy", "traces", "geometry")),
    *("energy_histogram.png", "sample_table.csv", "plan_table.csv", "history.json"),
}
METRICS = {"running.png", "segments.png", "metric_table.csv"}


@pytest.mark.by_default("regression", "no samples yet")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("regression", CHAIN | METRICS),
        ("own density", CHAIN | METRICS),
        ("no validation data", CHAIN),
        ("no samples yet", {"schedule.png", "energy.png", "traces.png", "history.json"}),
    ],
)
@pytest.mark.filterwarnings("ignore:BayesianModelAverage has no validation data")
def test_what_cannot_be_drawn_is_left_out_silently(kind: str, expected: set[str]) -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    module = OwnLikelihood(net=net) if kind == "own density" else BayesianModule(net=net, likelihood=Gaussian(0.1))
    train, val = regression_data()
    callbacks = [CyclicalSchedule(2, 0.5, 2), SampleCollector("s"), BayesianModelAverage(), PosteriorDashboard()]
    if kind == "no samples yet":
        callbacks = [PosteriorDashboard()]
    trainer = quiet_trainer(max_epochs=5, callbacks=callbacks, log_every_n_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train, None if kind == "no validation data" else val)
    assert not [str(w.message) for w in caught if "PosteriorDashboard" in str(w.message)]
    assert run_files(Path("sgmcmc")) == expected


def test_another_process_draws_the_stored_samples(tmp_path: Path) -> None:
    train, val = loaders()
    fit = quiet_trainer(max_epochs=5, callbacks=[CyclicalSchedule(2, 0.5, 2), SampleCollector(tmp_path / "s")])
    fit.fit(classifier(), train, val)
    callbacks = [
        SampleCollector(tmp_path / "s"),
        BayesianModelAverage(),
        PosteriorDashboard(figures=["schedule", "weights", "geometry", "reliability", "tables"]),
    ]
    quiet_trainer(callbacks=callbacks).test(classifier(), val, verbose=False)
    assert run_files(Path("sgmcmc")) == {
        *("test_geometry.png", "test_reliability.png"),
        *("test_sample_table.csv", "test_metric_table.csv"),
    }
    with open("sgmcmc/test_sample_table.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [8, 10, 18, 20]


def test_importance_weights_reach_the_pictures() -> None:
    class Weigh(SamplerCallback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            step = pl_module.sampler.step_count
            pl_module.chains.tags.log_weight = torch.tensor([-np.inf if step < 8 else 700.0 + np.log(step)])

    dashboard = PosteriorDashboard(figures=["weights"])
    worth = Each("on_posterior_sample", lambda *args: dashboard.history.effective_weights)
    callbacks = [SamplingSchedule(every_n_steps=4), Weigh(), dashboard, worth]
    quiet_trainer(max_epochs=3, callbacks=callbacks).fit(classifier(), *loaders())
    assert worth.seen == pytest.approx([0, 1, 400 / (64 + 144)])
    assert dashboard.history.weights == pytest.approx([0, 0.4, 0.6])
    assert Path("sgmcmc/weights.png").exists()


def test_on_two_ranks_the_first_one_writes(tmp_path: Path) -> None:
    callbacks = [
        CyclicalSchedule(2, 0.5, 2),
        PosteriorDashboard("sample", figures=["energy", "segments", "tables"]),
        SampleCollector(tmp_path / "s"),
        BayesianModelAverage(),
    ]
    trainer = quiet_trainer(max_epochs=10, strategy="ddp_fork", devices=2, callbacks=callbacks)
    trainer.fit(classifier(), datamodule=Blobs())
    folder = Path("sgmcmc")
    assert run_files(folder) >= {"energy.png", "segments.png", "history.json"}
    with open(folder / "sample_table.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(Posterior.load(tmp_path / "s")) == 4
    assert all(float(row["accuracy"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "epoch"}, "every must be 'sample' or 'cycle' or 'end', got 'epoch'"),
        ({"every_n_samples": 0}, "every_n_samples must be at least 1, got 0"),
        ({"figures": ["energies"]}, f"figures has an unknown name, 'energies': choose from {', '.join(PARTS)}"),
        ({"figures": "energy"}, r"figures should be a list of names, got 'energy': write \['energy'\]"),
        ({"geometry_samples": 1}, "geometry_samples must be at least 2, got 1"),
        ({"segment_pairs": 0}, "segment_pairs must be at least 1, got 0"),
        ({"segment_points": 1}, "segment_points must be at least 2, got 1"),
        ({"segment_batches": 0}, "segment_batches must be at least 1, got 0"),
    ],
)
def test_mistakes_say_what_is_wrong(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PosteriorDashboard(**options)
