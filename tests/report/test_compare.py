"""`sgmcmc compare`: intervals that cover, differences that are those of the stores, mistakes in one sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import (
    SWAG,
    BayesianModelAverage,
    DeepEnsemble,
    MCDropout,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.cli import main
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.diagnostics.draws import percentile_interval, resampled_means
from lightning_sgmcmc.report.compare import compare_runs
from lightning_sgmcmc.report.run_record import RunError
from tests.support.problems import Even, Net
from tests.support.trainers import quiet_trainer


def test_the_paired_interval_covers_the_true_difference() -> None:
    """95 % intervals of a mean difference, of 200 synthetic pairs of 150 data, noise shared by both.

    A coverage between 0.91 and 0.98 is accepted; that of the percentile interval at this size is about 0.945, so the
    false-alarm rate is 2 %. An interval that ignores the pairing is six times as wide and covers always.
    """
    generator = np.random.default_rng(0)
    covered, widths = 0, []
    for seed in range(200):
        shared = generator.gamma(1.0, size=150) * 3
        pair = np.stack([shared + generator.gamma(1.0, size=150) / 2 for _ in range(2)])
        pair[0] += 0.3
        means = resampled_means(pair, resamples=300, seed=seed)
        low, high = percentile_interval(means[1] - means[0])
        covered += low <= -0.3 <= high
        widths.append(high - low)
    assert 0.91 < covered / 200 < 0.98
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.sqrt(0.5 / 150), rel=0.1)


class Units(ArrayDataModule):
    """A regression with standardised targets."""

    target_mean, target_std = 5.0, 10.0

    def load(self) -> tuple[Split, Split, Split]:
        x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
        parts = [Split(part, part.sum(1, keepdim=True) / 3) for part in x.split(20)]
        return parts[0], parts[1], parts[2]


def run(folder: Path, module: BayesianModule, *callbacks: pl.Callback, data: Any = None, test: bool = True) -> Path:
    own = [*callbacks, SampleCollector(folder / "sgmcmc" / "samples"), BayesianModelAverage(), RunSummary()]
    trainer = quiet_trainer(max_epochs=2, callbacks=own, default_root_dir=folder)
    data = data or Even()
    trainer.fit(module, datamodule=data)
    if test:
        trainer.test(module, datamodule=data, verbose=False)
    return folder / "sgmcmc"


def test_runs_beside_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    data = Even()
    runs = [
        run(tmp_path / "with_a_very_long_name_that_no_table_has_room_for", Net(2), DeepEnsemble()),
        run(tmp_path / "dropout", Net(), DeepEnsemble(), MCDropout(3)),
        run(tmp_path / "swag", Net(), SWAG(2, num_draws=3, every_n_steps=1)),
        run(tmp_path / "sghmc", Net(), SamplingSchedule(every_n_steps=4)),
    ]
    capsys.readouterr()
    main(["compare", *map(str, runs), "--output", str(tmp_path / "page.html")])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert printed.startswith("4 runs on the same 20 test data")
    compared = compare_runs(runs)
    assert [one.kind for one in compared] == ["deep ensemble", "MC dropout", "SWAG", "cold ensemble"]
    planned = [json.loads((one / "results-val.json").read_text())["plan"]["kind"] for one in runs[:3]]
    assert planned == ["deep ensemble", "MC dropout", "SWAG"]
    assert [one.gradient_evaluations for one in compared] == [256, 128, 128, 128]  # 2 epochs of 64 data, 2 chains once
    assert all(one.seconds > 0 for one in compared)

    data.setup("test")
    test = data.splits[2]
    x, y = test.inputs, test.targets
    each = [_nll(Posterior.load(one, model=Net()), x, y) for one in runs]
    for one, nll in zip(compared[1:], each[1:], strict=True):
        change = one.differences["nll"]
        assert one.metrics["nll"].value == pytest.approx(nll.mean().item(), rel=1e-4)
        assert change.value == pytest.approx((nll - each[0]).mean().item(), rel=1e-3, abs=1e-5)
        width = 2 * 1.96 * (nll - each[0]).std().item() / 20**0.5
        assert change.high - change.low == pytest.approx(width, rel=0.25)
        assert change.low < change.value < change.high
        assert f"{change.value:+.4f}".replace("-", "−") in printed
    assert json.loads((runs[2] / "results.json").read_text())["samples"] == "networks (SWAG)"
    page = (tmp_path / "page.html").read_text()
    assert "Paired differences" in page
    assert '<th scope="row">dropout</th>' in page
    main(["compare", str(runs[1]), str(runs[2]), "--output", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text().startswith("| run | kind | NLL | error | Brier | gradients | seconds |")


def _nll(posterior: Posterior, x: Tensor, y: Tensor) -> Tensor:
    return -posterior.predict(x).probabilities.log().gather(1, y[:, None])[:, 0]


class Fewer(Even):
    def load(self) -> Any:
        train, val, test = super().load()
        return train, val, Split(test.inputs, test.targets.roll(1))


def test_a_regression_in_original_units_and_mistakes(tmp_path: Path) -> None:
    def regression(std: float) -> BayesianModule:
        torch.manual_seed(0)
        net = torch.nn.Linear(5, 1)
        return BayesianModule(net=net, likelihood=Gaussian(std), lr=0.01, seed=0)

    data = Units(batch_size=10)
    runs = [
        run(tmp_path / str(std), regression(std), SamplingSchedule(every_n_steps=2), data=data) for std in (0.5, 1.0)
    ]
    for one, folder in zip(compare_runs(runs), runs, strict=True):
        prediction = Posterior.load(folder).predict(data.splits[2].inputs)
        target = data.splits[2].targets * 10 + 5
        rmse = (prediction.mean - target).square().mean().sqrt().item()
        assert one.metrics["square_error"].value == pytest.approx(rmse, rel=1e-4)
        assert one.metrics["nll"].value == pytest.approx(one.evaluation.metrics["nll"], rel=1e-5)

    thousandths = Units(batch_size=10)  # its standardised targets are the same, and its NLL lower by log(1000)
    thousandths.target_mean, thousandths.target_std = 5e-3, 10e-3
    small = run(tmp_path / "small", regression(0.5), SamplingSchedule(every_n_steps=2), data=thousandths)
    with pytest.raises(RunError, match="with other targets or units"):
        compare_runs([runs[0], small])

    other = run(tmp_path / "other", Net(), SamplingSchedule(every_n_steps=4), data=Fewer())
    untested = run(tmp_path / "untested", Net(), SamplingSchedule(every_n_steps=4), test=False)
    same = run(tmp_path / "same", Net(), SamplingSchedule(every_n_steps=4))
    (tmp_path / "damaged" / "samples").mkdir(parents=True)
    (tmp_path / "damaged" / "results.json").write_text("{}")
    for given, sentence in [
        ([same], "a comparison needs two runs or more, got 1"),
        ([same, same], "is given twice"),
        ([same, same / ".." / same.name], "is given twice"),
        ([same, other], r"evaluated on different test data \(20 and 20 data, with other targets or units\)"),
        ([same, tmp_path / "damaged"], "has no per-datum evaluation on the test data.*sgmcmc test"),
    ]:
        with pytest.raises(RunError, match=sentence):
            compare_runs(given)
    assert [one.evaluation.stage for one in compare_runs([same, untested])] == ["val", "val"]
    (same / "evaluation-test.safetensors").write_bytes(b"12345678")
    with pytest.raises(RunError, match=r"evaluation-test.safetensors is damaged"):
        compare_runs([same, other])
