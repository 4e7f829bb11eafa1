"""The reference: Hamiltonian Monte Carlo with the full gradient, or a file of its predictive."""

import logging
import math
import time
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import rhat_limit
from lightning_sgmcmc.evaluation.reference import cifar10_hmc, read_probabilities
from lightning_sgmcmc.recipes.hmc_fidelity.problems import datamodule, module_of
from lightning_sgmcmc.recipes.hmc_fidelity.scores import Scores, ambiguity, judged, members_of
from lightning_sgmcmc.recipes.hmc_fidelity.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.trainers import prepare_run
from lightning_sgmcmc.reference import sample
from lightning_sgmcmc.reference.report import agreement as agreement_of_chains

FALSE_ALARMS = 0.01
"""The probability that chains of one law are said to disagree, over all test data together."""


@dataclass(frozen=True)
class Truth:
    """The reference.

    Attributes:
        scores: of its predictive.
        halves: predictives of two halves of its chains, each of shape (n, K); None of a file.
        rhat: the largest R-hat of log p(y|x, θ) over the test data; NaN of a file.
        limit: what R-hat exceeds with a probability of 1 % if all chains have one law.
        effective: the least effective number of draws of these.
        doubts: sentences on the run, see `ReferenceReport`.
    """

    scores: Scores
    halves: tuple[Tensor, Tensor] | None
    rhat: float = math.nan
    limit: float = math.nan
    effective: float = math.nan
    doubts: tuple[str, ...] = ()


def truth(seed: int, settings: Settings, options: Options) -> Truth:
    """Return the reference of a file, or else of chains with the full gradient."""
    prepare_run(options)
    logging.getLogger("lightning_sgmcmc").setLevel(logging.ERROR)
    data = datamodule(settings, options)
    data.setup("fit")
    targets = data.splits[2].targets
    if settings.reference is not None:
        read = cifar10_hmc if settings.data == "CIFAR-10" else read_probabilities
        probabilities = read(settings.reference)[: len(targets)]
        return Truth(Scores(probabilities, *judged(probabilities, targets), math.nan, math.nan, 0.0), None)
    given, begun = settings.truth, time.process_time()
    module = module_of(settings, lr=1.0, seed=seed)
    if options.accelerator() != "cpu" and torch.cuda.is_available():
        module.to("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the doubts are in the table
        posterior = sample(
            module,
            data,
            "hmc",
            given.chains,
            given.warmup,
            given.draws,
            seed,
            max_depth=given.max_depth,
            length=given.length,
        )
    seconds = time.process_time() - begun
    members = members_of(posterior, data.splits[2], data)
    of_chains = members.view(given.draws, given.chains, *members.shape[1:])  # an iteration's draws are in a row
    rhat, effective, limit = in_function_space(of_chains, targets)
    halves = of_chains.double().mean(0).float().chunk(2)
    average = members.double().mean(0)
    weights = torch.full((len(members),), 1 / len(members))
    assert posterior.report is not None
    return Truth(
        Scores(average.float(), *judged(average, targets), ambiguity(members, weights), math.nan, seconds),
        (halves[0].mean(0), halves[1].mean(0)),
        rhat,
        limit,
        effective,
        tuple(posterior.report.warnings),
    )


def in_function_space(members: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return the largest R-hat of the log-likelihoods of test data, their least effective size, and R-hat's limit.

    Args:
        members: probabilities, shape (draws, chains, n, K).
        targets: labels, shape (n,).
    """
    draws, chains, count, _ = members.shape
    index = targets.view(1, 1, count, 1).expand(draws, chains, count, 1)
    traces = members.gather(-1, index)[..., 0].double().clamp_min(1e-300).log().transpose(0, 1)
    rhat, bulk, _ = agreement_of_chains(traces.numpy())
    return rhat, bulk, rhat_limit(chains, draws, FALSE_ALARMS / count)
