"""A fast network on CIFAR-10 by stacked cyclical chains, beside an ensemble of such networks at equal seconds.

The speed runs on CIFAR-10 train one network to 94.0 % in 2.59 s on one A100 (airbench, Jordan 2024); a ResNet-18 takes
seven minutes for 96 %. The question here is what a posterior predictive of four to sixteen such networks is worth in a
minute. The network and its pipeline are our own, in their manner: frozen whitening filters, three short stages, images
that stay on the device and are augmented there by batch, and all chains of a fit as one compiled function in bfloat16.
Its normalisation is over groups of channels of one image. BatchNorm, which the speed runs use, makes p(y|x, θ) depend
on the batch, and its running statistics lag behind a chain that moves by noise.

* `chains`: C chains of cyclical SGHMC. The average is over the newer half of all draws, so it can be read after each.
* `snapshots`: the same at temperature 0, so the difference is the noise.
* `ensemble`: C networks by SGD with momentum and one cosine, stacked in one fit by the same code; their last states.
* `network`: one such network.

Every fit has the same seconds. On a CPU, which computes the chains one after another, they follow from the same number
of passes over the images by all chains together; in `full` they are the budget, and a trial of sixty steps gives the
speed of each number of chains. An ensemble and a network are trained for several lengths, each to its own end, since
their states on the way are worth less; the chains have one fit. The seconds are those of training, on a CPU of the
processor, without the first steps, in which the network is compiled. A prediction of the chains takes as many more
networks as the table says, and its time is not counted. The error, the NLL and the ECE are of the test images, the
AUROC is against SVHN, or against images with other patterns or of `--set outside_folder=DIR`. `--set folder=DIR` takes
the images of DIR/train/<class>/ and DIR/test/<class>/.

The temperature is below 1, as in the programs of cSG-MCMC and CSGLD on augmented CIFAR, so these are cold chains and
not the posterior itself.

The temperature, the cycles, the share of the draws and the strength of the patterns of quick were chosen after
fourteen fits with the seed 100. The first seven of them had quick's own images with weaker patterns, the others had
other images. Averages over all draws were far worse, since early cycles leave the networks unfinished; the temperature
0.1 had a higher NLL and AUROC than 0.01, and two cycles were like four. The ensemble has the same step size and prior,
which were tuned for nobody.

Measured (quick, three seeds, synthetic images of 16×16 pixels, four chains, one core, standard errors):

    method       error %       NLL             ECE             AUROC           seconds
    chains ×4    3.07 ± 0.18   0.198 ± 0.007   0.113 ± 0.003   0.933 ± 0.006   18.8 ± 0.3
    snapshots ×4 3.63 ± 0.12   0.215 ± 0.010   0.117 ± 0.006   0.927 ± 0.005   19.1 ± 0.1
    ensemble ×4  3.20 ± 0.20   0.200 ± 0.005   0.110 ± 0.002   0.931 ± 0.004   19.3 ± 0.3
    one network  7.70 ± 0.85   0.243 ± 0.024   0.024 ± 0.003   0.865 ± 0.019   22.3 ± 0.3

The chains do not beat the ensemble at equal steps and seconds: the NLL differs by -0.002 ± 0.009, the error by -0.13 ±
0.07 % and the AUROC by 0.002 ± 0.009, and they take six times as many networks for a prediction. The noise helps
against snapshots (error -0.57 ± 0.09 %, NLL -0.017 ± 0.009). The one network is the best calibrated by far: averages of
networks that are trained so briefly are underconfident. This is an order on easy images and says nothing about CIFAR.

`full`, sixteen chains on CIFAR-10 in 60 s of one GPU, was never run: no GPU was available. Its step size, temperature
and widths are guesses. What was checked is that the parts of such a fit run on a CPU in small, and that a step of
sixteen chains waits for nothing on the stand-in device of `tests/cuda`.
"""

from typing import Any

from lightning_sgmcmc.figures.canvas import legend_below, panels, save_figure
from lightning_sgmcmc.recipes.cifar_sprint.fits import CYCLICAL, Point, datamodules, one
from lightning_sgmcmc.recipes.cifar_sprint.settings import Settings
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, draw_band
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings

METHODS = ("chains", "snapshots", "ensemble", "network")
NLL, REACHED = "NLL (nats)", "share of repeats that reach the NLL of one network"
NEAR = "seconds to the NLL of one network"

Case = tuple[str, int]
"""A method and its number of stacked chains."""


def run(options: Options) -> list[Row]:
    """Run all methods with all numbers of chains and seeds, draw the curves, return the table."""
    settings = read_settings(Settings, options)
    known, unknown = datamodules(settings, options)
    require(known, *([] if unknown is None else [unknown]))
    methods, seeds = options.chosen(METHODS), options.seeds(settings.seeds)
    cases = cases_of(methods, settings)
    jobs = [(*case, length, seed) for case in cases for length in lengths_of(case[0], settings) for seed in seeds]
    outcomes = run_jobs(one, jobs, options, settings, in_turn=options.full)
    found = {}
    for case in cases:
        method, chains = case
        by_length = [
            [outcomes[method, chains, length, seed] for seed in seeds] for length in lengths_of(method, settings)
        ]
        found[case] = [joined(list(fits)) for fits in zip(*by_length, strict=True)]
    save_figure(picture({name_of(case): curves for case, curves in found.items()}), options.out / "curves.png")
    rows = [row for case in cases for row in rows_of(name_of(case), found[case])]
    return rows + comparisons(found)


def cases_of(methods: list[str], settings: Settings) -> list[Case]:
    """Return the methods with each number of chains; a network is one chain."""
    return [(method, chains) for method in methods for chains in ((1,) if method == "network" else settings.chains)]


def lengths_of(method: str, settings: Settings) -> list[float]:
    """Return the shares of the budget for which a method is trained: cycles end in draws on the way."""
    return [1.0] if method in CYCLICAL else sorted(settings.lengths)


def name_of(case: Case) -> str:
    """Return a case's name in the table."""
    method, chains = case
    return "one network" if method == "network" else f"{method} ×{chains}"


def joined(fits: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the longest fit of a repeat with the curve of all.

    Args:
        fits: what `one` returns, in the order of their lengths.
    """
    return fits[-1] | {"curve": [point for fit in fits for point in fit["curve"]]}


def rows_of(name: str, repeats: list[dict[str, Any]]) -> list[Row]:
    """Return the figures of a case at the end of the budget.

    Args:
        name: the case's.
        repeats: what `joined` returns, for each seed.
    """
    metrics = repeats[0]["curve"][-1][1]
    rows = [mean_row(name, metric, [one["curve"][-1][1][metric] for one in repeats]) for metric in metrics]
    rows.append(mean_row(name, "networks in a prediction", [one["networks"] for one in repeats]))
    rows.append(mean_row(name, "steps of each network", [one["steps"] for one in repeats]))
    return [*rows, mean_row(name, "seconds of training", [one["seconds"] for one in repeats])]


def comparisons(found: dict[Case, list[dict[str, Any]]]) -> list[Row]:
    """Return the differences of the chains from the ensemble and the snapshots, and the times to one network's NLL.

    That NLL is the network's lowest, over its lengths of training. A case that does not reach it in every repeat has
    no time.

    Args:
        found: what `joined` returns for each seed, by case.
    """
    rows = []
    for (method, chains), ours in found.items():
        for other in ("ensemble", "snapshots"):
            if method == "chains" and (other, chains) in found:
                both = [(a["curve"][-1][1], b["curve"][-1][1]) for a, b in zip(ours, found[other, chains], strict=True)]
                title = f"{name_of((method, chains))} - {name_of((other, chains))}"
                rows += [mean_row(title, metric, [a[metric] - b[metric] for a, b in both]) for metric in both[0][0]]
    if ("network", 1) in found:
        aims = [min(figures[NLL] for _, figures in one["curve"]) for one in found["network", 1]]
        for case, repeats in found.items():
            times = [first_time(one["curve"], aim) for one, aim in zip(repeats, aims, strict=True)]
            rows.append(mean_row(name_of(case), REACHED, [float(time is not None) for time in times]))
            reached = [time for time in times if time is not None]
            if len(reached) == len(times):
                rows.append(mean_row(name_of(case), NEAR, reached))
    return rows


def first_time(curve: list[Point], aim: float) -> float | None:
    """Return the seconds of the first point of a curve whose NLL is at most `aim`; None if there is none.

    >>> first_time([(1.0, {NLL: 0.5}), (2.0, {NLL: 0.3})], 0.4)
    2.0
    """
    return next((seconds for seconds, figures in curve if figures[NLL] <= aim), None)


def picture(found: dict[str, list[dict[str, Any]]]) -> Any:
    """Draw each figure over the seconds of training, the means over repeats with their 95 % intervals.

    Args:
        found: what `joined` returns for each seed, by the cases' names.
    """
    metrics = list(next(iter(found.values()))[0]["curve"][-1][1])
    figure, grid = panels(2, 2, 7.5, 5.6)
    for axes, metric in zip(grid.flat, metrics, strict=False):
        for index, (name, repeats) in enumerate(found.items()):
            curves = [one["curve"] for one in repeats]
            seconds = [sum(point[0] for point in points) / len(points) for points in zip(*curves, strict=True)]
            draw_band(axes, seconds, [[figures[metric] for _, figures in curve] for curve in curves], index, name)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(f"{metric}\n{INTERVAL}")
    for axes in grid.flat[len(metrics) :]:
        axes.set_visible(False)
    legend_below(figure, grid[0, 0])
    return figure
