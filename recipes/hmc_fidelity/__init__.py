"""How near samplers come to Hamiltonian Monte Carlo: agreement and total variation of predictives, ResNet-20-FRN-Swish.

The truth is the predictive distribution of HMC with the full gradient, at temperature 1. Every method is one fit of
four stacked chains with as many steps, so as many gradients; Adam's warm start, burn-in and the hot chains of replica
exchange count. "one network" (MAP, one chain of all these steps) and "deep ensemble" (four networks) are the baselines,
and "HMC, one half against the other" is the ceiling: the predictives of two halves of the reference's chains.

* agreement: share of the test data for which both predict the same class.
* total variation: the mean over the test data of ½·Σ_k |p_k - q_k|.
* error, NLL and ambiguity of the predictive itself, where ambiguity is by how many nats the geometric mean of the
  samples is better than a sample (`scores.ambiguity`, the definition of bdlx and of PX-SGMCMC).
* R-hat of the reference is of log p(y|x, θ) of every test datum: in function space.

Adam-SGHMC is `ScaleAdaptedSGHMC`, pSMILE is `pMCLMC`, PX-SGHMC is SGHMC on the factors of `expand`. The prior of the
factors gives each weight the variance of the plain prior, but heavier tails, so PX-SGHMC has another posterior, and
need not come to the ceiling.

Each method's step size is that of a ladder of three whose fit has the least NLL on validation data, for all methods
alike; the choice is in nobody's budget. The row "least total variation of the ladder" is the best of the three by the
truth, with the first seed (at the published size in short fits); it is optimistic, since nobody has the truth.

`quick` is a network of one hidden layer with Swish on few of scikit-learn's digits, with its own HMC; two seeds. `full`
is the published setting on CIFAR-10, for one GPU: 40,960 images without augmentation, prior N(0, 1/5) on all weights
(Izmailov et al. 2021, Table 3), batch 80. It reads the published HMC predictive:

    sgmcmc recipe hmc_fidelity --full --set reference=probs.csv

with `data/cifar10/probs.csv` of izmailovpavel/neurips_bdl_starter_kit. Without the file it runs HMC on 640 images,
which needs CUDA, is not expected to converge, and says so by its R-hat. `full` has never been run: no GPU was
available. Its parts run in the tests, on synthetic images. It differs from the published setting in the normalisation
of images (by the data's own mean and standard deviation) and in torch's initial weights; that the training images are
the first 40,960 in the order of TensorFlow Datasets is inferred from the programs. Replica exchange keeps the coldest
slot's draws alone, and by our estimate the noise of mini-batches lets hardly a swap pass at that size.

Measured (quick, two seeds, 656 processor seconds on a busy machine): the reference has converged (R-hat at most 1.02,
at least 566 effective draws). Total variation to it: its two halves 0.019; SGHMC 0.037, contour SGHMC 0.038, Adam-SGHMC
0.038, cyclical SGHMC 0.041, pSMILE 0.049, SGLD 0.051, pSGLD 0.054, replica exchange 0.061, one network 0.070, deep
ensemble 0.071, PX-SGHMC 0.081. Chains of 1,000 steps are short, so a part of a sampler's distance is Monte Carlo error.
Agreement says little here: the two baselines have as much (0.986 and 0.989) as the two halves (0.989). NLL says
nothing: that of the truth is 0.282, and the baselines', 0.21, is better. For all samplers but PX-SGHMC the step size by
NLL is the best by the truth too. The ladders of pSGLD, pSMILE, SGLD, PX-SGHMC and cyclical SGHMC were moved to smaller
values, and the number of data, the width and the length of the chains were chosen, after trials of 60 to 1,000 steps,
of which NLL was seen but no distance to the truth.
"""

import math
from typing import Any

from lightning_sgmcmc.recipes.hmc_fidelity.published import FIGURES
from lightning_sgmcmc.recipes.hmc_fidelity.settings import Settings
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings

HMC = "HMC"
HALVES = "HMC, one half against the other"
LABELS = {"nll": "NLL (nats)", "total variation": "total variation to HMC", "agreement": "agreement with HMC"}


def run(options: Options) -> list[Row]:
    """Run the reference and every method, return the table.

    Raises:
        ValueError: if there is neither a file of the reference nor a GPU to compute one on CIFAR-10, or the settings
            have no step sizes of a method.
    """
    from lightning_sgmcmc.recipes.hmc_fidelity.methods import METHODS
    from lightning_sgmcmc.recipes.hmc_fidelity.problems import datamodule

    settings = read_settings(Settings, options)
    methods = options.chosen(METHODS)
    check(settings, methods)
    require(datamodule(settings, options))
    jobs = [(name, options.seed, len(options.repeated(settings.seeds))) for name in (HMC, *methods)]
    found = dict(zip((HMC, *methods), run_jobs(one, jobs, options, settings).values(), strict=True))
    known = found.pop(HMC)
    published = FIGURES if settings.data == "CIFAR-10" else {}
    rows = rows_of_truth(known, published)
    for name, own in found.items():
        rows += rows_of_method(name, own, known.scores.probabilities, published)
    return rows


def check(settings: Settings, methods: list[str]) -> None:
    """Raise if the settings cannot be run here; see `run`."""
    import torch

    if settings.data == "CIFAR-10" and settings.reference is None and not torch.cuda.is_available():
        raise ValueError(
            "hmc_fidelity on CIFAR-10 needs the HMC predictive as a file (--set reference=probs.csv, which is "
            "data/cifar10/probs.csv of izmailovpavel/neurips_bdl_starter_kit) or a CUDA device to compute one on "
            f"{settings.truth.data} images: pass the file, or leave out --full"
        )
    missing = [name for name in methods if not settings.lr.get(name)]
    if missing:
        raise ValueError(f"lr has no step sizes for {', '.join(missing)}: add them, or choose other --methods")
    if settings.chains != len(settings.ladder) or settings.truth.chains % 2:
        raise ValueError(
            f"chains={settings.chains} must be the {len(settings.ladder)} temperatures of ladder, and truth.chains an "
            f"even number, got {settings.truth.chains}"
        )


def one(name: str, seed: int, seeds: int, settings: Settings, options: Options) -> Any:
    """Return the reference, or the scores of a method's fits."""
    from dataclasses import replace

    if name == HMC:
        from lightning_sgmcmc.recipes.hmc_fidelity.truth import truth

        return truth(seed, settings, options)
    from lightning_sgmcmc.recipes.hmc_fidelity.methods import fits_of

    return fits_of(name, seed, replace(settings, seeds=seeds), options)


def distances(probabilities: Any, reference: Any) -> dict[str, float]:
    """Return agreement and total variation of two predictives (n, K)."""
    from lightning_sgmcmc.diagnostics import agreement, total_variation

    return {
        "agreement": float(agreement(probabilities, reference)),
        "total variation": float(total_variation(probabilities, reference)),
    }


def scored(scores: Any) -> dict[str, float]:
    """Return the scores of a predictive by metric, without what is not known."""
    found = {name: getattr(scores, name) for name in ("error", "nll", "ambiguity")}
    found["processor seconds of a fit"] = scores.seconds
    return {name: value for name, value in found.items() if math.isfinite(value)}


def rows_of(name: str, found: list[dict[str, float]], published: dict[str, dict[str, float]]) -> list[Row]:
    """Return a row for each metric: its mean over fits, with the published figure.

    Args:
        name: the method.
        found: its metrics, one mapping for each fit.
        published: figures by method and metric.
    """
    figures = published.get(name, {})
    return [
        mean_row(name, LABELS.get(metric, metric), [one[metric] for one in found], figures.get(metric))
        for metric in found[0]
    ]


def rows_of_method(name: str, found: Any, reference: Any, published: dict[str, dict[str, float]]) -> list[Row]:
    """Return the rows of a method: distances to the reference and scores, its step size, and the ladder's best.

    Args:
        name: the method.
        found: its fits, as `Found`.
        reference: the reference's predictive, shape (n, K).
        published: figures by method and metric.
    """
    own = [distances(fit.probabilities, reference) | scored(fit) for fit in found.fits]
    of_ladder = {lr: distances(fit.probabilities, reference)["total variation"] for lr, fit in found.tried.items()}
    best = min(of_ladder, key=of_ladder.__getitem__)
    return [
        *rows_of(name, own, published),
        Row(name, "step size", found.lr),
        Row(name, "least total variation of the ladder", of_ladder[best]),
        Row(name, "step size of that", best),
    ]


def rows_of_truth(known: Any, published: dict[str, dict[str, float]]) -> list[Row]:
    """Return the rows of the reference: its scores, what its halves have in common, and whether its chains agree.

    Args:
        known: the `Truth`.
        published: figures by row and metric.
    """
    rows = rows_of(HMC, [scored(known.scores)], published)
    if known.halves is None:
        return rows
    rows += rows_of(HALVES, [distances(*known.halves)], published)
    return [
        *rows,
        Row(HMC, "R-hat of test log-likelihoods, the largest", known.rhat),
        Row(HMC, "R-hat that chains of one law exceed in 1 % of runs", known.limit),
        Row(HMC, "effective draws of these, the fewest", known.effective),
        Row(HMC, "converged by that R-hat (1 is yes)", float(known.rhat <= known.limit)),
        Row(HMC, "doubts of its report", float(len(known.doubts))),
    ]
