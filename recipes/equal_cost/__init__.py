"""Many methods and `--auto` at the same number of gradient evaluations, on fifteen data sets.

Digits, 6,000 images of MNIST, three tables for classification (german, pima, covertype) and five for regression
(energy, concrete, kin8nm, power, bikes), with an MLP; Digits and MNIST also with a small CNN; 5,000 images of CIFAR-10
at 16×16 (cifar_16; cifar_16_long has three times the epochs), or 8,000 at 32×32 (cifar_32_small; cifar_32 has a larger
network, for a GPU or patience), with a residual network and augmentation; text messages (sms) with averaged embeddings
of their words. `bikes` is split by time: its test data are the last fifth of two years, after the validation data,
which are after the training data.

Every method makes the gradient evaluations of one network in a given number of epochs, counted in examples, over all
its chains: four members of an ensemble have a quarter each, two of `ensemble_2` a half. `ensemble_4x` makes four times
as many. What a method tunes counts too, so `sgd_grid` trains four networks for a quarter each and takes one by
validation data. Only `sgd_tuned`, `ensemble_tuned`, `mc_dropout_tuned` and `swag_tuned` have settings for each data
set, from a grid on other seeds that was free of charge (`equal_cost.yaml`, `tests/benchmarks/equal_cost_grid.py`). Rows
with _temperature are calibrated on the validation data, `auto_10` has ten samples of `auto`.

`page.md` has the tables: first whether `auto` keeps the limits of `limits.py`, which were fixed before the run, then
metrics, cost, and paired differences from `ensemble` and from `ensemble_tuned`, with 95 % intervals of a bootstrap over
seeds and test data. It ends with sentences on where `auto` wins and loses.

Quick is one seed on two data sets (`python -m recipes equal_cost --data-root DIR`), full eight seeds on all but
mnist_cnn, cifar_16_long and those at 32×32, which `--set chosen_sets=[mnist_cnn]` runs. On cifar_16, sms and bikes it
has five seeds of the main methods. CIFAR-10 is read as `CIFAR10DataModule` does, at most as many images as the
settings say; the UCI sets SMS Spam Collection (`sms_spam/SMSSpamCollection`) and Bike Sharing
(`bike_sharing/hour.csv`), both CC BY 4.0, from their original files.
"""

import time
import warnings
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning

if TYPE_CHECKING:
    from lightning_sgmcmc import Posterior
    from lightning_sgmcmc.recipes.equal_cost.methods import Fit
    from lightning_sgmcmc.recipes.equal_cost.problems import Problem


def run(options: Options) -> list[Row]:
    """Run every method on every data set with every seed, write the page and the picture, return the table."""
    from lightning_sgmcmc.recipes.equal_cost.methods import METHODS
    from lightning_sgmcmc.recipes.equal_cost.pages import write_page
    from lightning_sgmcmc.recipes.equal_cost.problems import Problem

    settings = read_settings(Settings, options)
    methods, seeds = options.chosen(METHODS), options.seeds(settings.seeds)
    sets = {name: settings.sets[name] for name in settings.chosen_sets}
    for name, own in sets.items():
        require(Problem(name, own, options.data_root, options.seed))
    jobs = [
        (data, method, seed)
        for place, seed in enumerate(seeds)
        for data, own in sets.items()
        for method in methods
        if place < own.get("seeds", len(seeds))
        and (method in settings.main or options.methods or not own.get("main_only"))
    ]
    longest_first = sorted(jobs, key=lambda job: (job[2], job[1] != "ensemble_4x"))  # of each seed
    cells = run_jobs(one, longest_first, options, settings)
    return write_page([cells[job] for job in jobs], settings, len(seeds), options)


def one(data: str, method: str, seed: int, settings: Settings, options: Options) -> dict[str, Any]:
    """Fit and score one method on one data set; return its cell: the method's row and those derived from it."""
    from lightning_sgmcmc import NonFiniteEnergyError
    from lightning_sgmcmc.namespace import pl
    from lightning_sgmcmc.recipes.equal_cost.comparison import COLUMNS
    from lightning_sgmcmc.recipes.equal_cost.methods import (
        CALIBRATED,
        COMPRESSED,
        FEW,
        METHODS,
        candidates,
        setting_of,
    )
    from lightning_sgmcmc.recipes.equal_cost.problems import Problem
    from lightning_sgmcmc.recipes.equal_cost.scores import score

    silence_lightning()
    warnings.filterwarnings("ignore", message="RunPlan|All chains start with the same|temperature=0 is optimization")
    problem = Problem(data, settings.sets[data], options.data_root, seed)
    problem.setup("fit")
    pl.seed_everything(seed, verbose=False)
    cell: dict[str, Any] = {"data": data, "method": method, "seed": seed, "rows": {}}
    cell["settings"] = {"set": dict(settings.sets[data]), "method": dict(setting_of(settings, data, method))}
    val = [(problem.splits[1].inputs, problem.splits[1].targets)]
    cell |= {"gradient_evaluations": 0, "seconds": 0.0}
    try:
        found = []
        for setting in candidates(setting_of(settings, data, method)):
            fit = METHODS[method](problem, setting)
            cell["seconds"] += fitted(fit, problem)
            cell["gradient_evaluations"] += fit.module.chains.counters.gradient_evaluations * fit.module.num_chains
            assert fit.module.posterior is not None
            found.append(fit.module.posterior)
        best = found[0] if len(found) == 1 else min(found, key=lambda one: one.evaluate(val).bma["nll"])
        posteriors: dict[str, Posterior] = {method: best}
        if method in CALIBRATED:
            posteriors[CALIBRATED[method]] = best.calibrate(val)
        if method in COMPRESSED:
            posteriors[COMPRESSED[method]] = best.compress(min(FEW, len(best)), val)
        for row, posterior in posteriors.items():
            scores = score(posterior, problem)
            shown = {name: [float(f"{v:.5g}") for v in getattr(scores, name).tolist()] for name in COLUMNS}
            cell["rows"][row] = {"metrics": scores.metrics, **shown}
    except NonFiniteEnergyError as error:
        cell["failed"] = str(error)
    return cell


def fitted(fit: "Fit", problem: "Problem") -> float:
    """Train; return the seconds."""
    trainer = quiet_trainer(
        accelerator="cpu",
        max_steps=fit.steps,
        callbacks=[*fit.callbacks, kept_samples()],
        num_sanity_val_steps=0,
        limit_val_batches=None if fit.validates else 0,
        check_val_every_n_epoch=10**6,  # a method that needs the validation data reads them itself
    )
    start = time.perf_counter()
    resumed_fit(trainer, fit.module, problem)
    return time.perf_counter() - start
