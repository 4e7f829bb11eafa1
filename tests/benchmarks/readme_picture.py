"""The picture of README: `python -m tests.benchmarks.readme_picture --out docs/readme.png`.

`sgmcmc fit --baselines` on the main example, mini-batches and no settings. Left: the NLL of the test data for each
sample, for the average of the samples so far, and for one network and an ensemble of four at equal cost. Right: the
test image of which the average is least certain, with the classes' probabilities and the samples' central 90 %.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.cli import main as sgmcmc
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.predictions import ClassPrediction
from tests.support.paths import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "digits_auto.yaml"
GREY, ORANGE, BLUE, GREEN = "#999999", "#D55E00", "#0072B2", "#009E73"
LINES = {"sgd": ("one network", GREEN), "ensemble": ("ensemble of 4", BLUE)}


def fitted(folder: Path, epochs: int) -> tuple[Posterior, dict[str, float]]:
    """Run the example with its baselines in a folder; return the samples, and the test NLL of each method."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        options = [f"--trainer.max_epochs={epochs}", "--trainer.enable_progress_bar=false"]
        sgmcmc(["fit", "--config", str(RECIPE), "--baselines", *options])
        run = next(folder.glob("runs/*/version_0"))
        rows = json.loads((run / "results.json").read_text())["rows"]
        return Posterior.load(run), {row["method"]: row["value"] for row in rows if row["metric"] == "nll"}
    finally:
        os.chdir(before)


def running(prediction: ClassPrediction, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the NLL of each sample, and of the weighted average of the first 1, 2, … samples, shape (S,)."""
    assert prediction.sample_probabilities is not None
    each = prediction.sample_probabilities[:, torch.arange(len(y)), y]
    sums = (weights[:, None] * each).cumsum(0) / weights.cumsum(0)[:, None]
    return -each.log().mean(1), -sums.log().mean(1)


def draw(prediction: ClassPrediction, weights: Tensor, data: Any, others: dict[str, float], path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    single, average = running(prediction, weights, data.targets)
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(8, 2.8), width_ratios=[2.2, 0.8, 1.6], constrained_layout=True
    )
    at = range(1, len(single) + 1)
    left.plot(at, single, ".", color=GREY, markersize=4, label="single samples")
    left.plot(at, average, color=ORANGE, linewidth=2, label="their average")
    for name, (label, color) in LINES.items():
        left.axhline(others[name], color=color, linewidth=1.2, linestyle="--", label=label)
    left.set(xlabel="samples", ylabel="NLL per test image", title="Digits: better than its samples")
    left.legend(fontsize=8)
    image = int(prediction.probabilities.amax(1).argmin())
    middle.imshow(data.inputs[image].reshape(8, 8), cmap="gray_r")
    middle.set(xticks=[], yticks=[], title="least certain")
    low, high = (bound[image] for bound in prediction.interval(0.9))
    probability = prediction.probabilities[image]
    right.bar(range(10), probability, color=ORANGE, alpha=0.6)
    right.vlines(range(10), low, high, color="black")
    right.set(xticks=range(10), ylim=(0, 1), xlabel="class", title="probability, 90 % of samples")
    for axis in (left, middle, right):
        axis.title.set_fontsize(10)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--epochs", type=int, default=200, help="epochs of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        posterior, others = fitted(Path(folder), options.epochs)
        digits = DigitsDataModule()
        digits.setup("test")
        data = digits.splits[2]
        prediction = posterior.predict(data.inputs, return_samples=True)
        assert isinstance(prediction, ClassPrediction)
        weights = torch.tensor([record.log_weight for record in posterior.records]).double().softmax(0)
        draw(prediction, weights, data, others, options.out)
    for name in ("single", "bma", *LINES):
        print(f"{name}: {others[name]:.4f}")


if __name__ == "__main__":
    main()
