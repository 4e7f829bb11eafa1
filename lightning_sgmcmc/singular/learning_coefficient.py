"""The local learning coefficient of a trained network by one call, and the target that it samples."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks.learning_coefficient import LearningCoefficient
from lightning_sgmcmc.callbacks.schedule import SamplingSchedule
from lightning_sgmcmc.checks import check_count, check_positive, check_within
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.evaluation.passes import Kind
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import HOOKS, overrides
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.pretrained import bayesianize
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.run.learning_coefficient import LearningCoefficientEstimate
from lightning_sgmcmc.samplers import SGLD, Sampler


def localized(num_data: int, gamma: float = 100.0, nbeta: float | None = None) -> dict[str, Any]:
    """Return the arguments with which a `BayesianModule` samples around its weights w*.

        exp(-n·β·L(w) - γ/2·‖w - w*‖²)

    Chains sample exp(-U/τ) with U = n·L - log p(w). So τ = n/(n·β) = 1/β, and the prior is N(w*, 1/(γ·τ)): the
    temperature divides the prior too, and γ of the target is exact.

    Args:
        num_data: n, the number of training data.
        gamma: γ > 0, the precision of the localisation: without data, weights have a standard deviation of 1/√γ.
        nbeta: n·β > 0; None is n/log n.

    Raises:
        ValueError: for an argument out of range.

    Source: Lau, Furman, Wang, Murfet & Wei 2023 (The Local Learning Coefficient, arXiv 2308.12108); Watanabe
    2013 (A widely applicable Bayesian information criterion, β = 1/log n).

    >>> {name: str(value) for name, value in localized(num_data=100, gamma=4.0, nbeta=25.0).items()}
    {'temperature': '4.0', 'prior': "GaussianPrior(std=0.25, center='start')", 'chain_start': 'same'}
    """
    check_count("num_data", num_data, least=2, optional=False)
    check_positive("gamma", gamma)
    if nbeta is not None:
        check_positive("nbeta", nbeta)
    temperature = math.log(num_data) if nbeta is None else num_data / nbeta
    prior = GaussianPrior((gamma * temperature) ** -0.5, center="start")
    return {"temperature": temperature, "prior": prior, "chain_start": "same"}


def learning_coefficient(
    network: "nn.Module | BayesianModule",
    data: Any,
    likelihood: Likelihood | None = None,
    *,
    gamma: float = 100.0,
    nbeta: float | None = None,
    lr: float | None = None,
    sampler: Callable[..., Sampler] = SGLD,
    num_chains: int = 4,
    num_steps: int = 2000,
    burn_in: float = 0.25,
    every_n_steps: int = 5,
    batch_size: int = 1000,
    loss: Kind = "own",
    checkpoint: "Mapping[str, Any] | str | Path | None" = None,
    what: Any = "all",
    seed: int | None = None,
    module: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> LearningCoefficientEstimate:
    """Estimate the local learning coefficient of a trained network: sample around its weights, and report.

        λ̂ = n·β·(E[L(w)] - L(w*)),   w ~ exp(-n·β·L(w) - γ/2·‖w - w*‖²)

    The network is copied and keeps its weights. For settings beyond these, call `Trainer.fit` with `localized` and
    the callback `LearningCoefficient`, as this function does.

    Args:
        network: a trained network of torch, or a `BayesianModule` with a `net`, whose likelihood is used.
        data: the training data: a pair of tensors (x, y), a data set, a loader, or a datamodule.
        likelihood: p(y | output), whose -log is the loss; None is `Categorical()`, or the module's. For a mean squared
            error pass `Gaussian(std)`: the loss is MSE/(2·std²) and a constant.
        gamma: γ > 0, the precision of the localisation.
        nbeta: n·β; None is n/log n.
        lr: step size of the gradient of the mean loss; None is the sampler's default. A step ε of the literature, as in
            Δw = -ε/2·(n·β·∇L + γ·(w - w*)) + N(0, ε), is lr = ε·n·β/2.
        sampler: a sampler class, or a callable as for `BayesianModule`.
        num_chains: chains on the device, at least 4 for a reliable R-hat.
        num_steps: steps of each chain.
        burn_in: share of the steps before the first draw, in [0, 1).
        every_n_steps: steps between draws.
        batch_size: data in a batch, of tensors and data sets.
        loss: "own", "full" or "step", see `LearningCoefficient`.
        checkpoint: weights to load first, see `bayesianize`.
        what: which weights to sample, see `bayesianize`: "all", or name patterns of a component for its restricted
            coefficient.
        seed: of starts, noise and data order; None uses `seed_everything`'s or a random one.
        module: further arguments of `BayesianModule`, such as `chain_execution`.
        trainer: further arguments of `Trainer`, such as `logger` or `accelerator`.

    Raises:
        ValueError: for an argument out of range, a run too short for a draw, or data without a length.
        TypeError: if the module defines its own loss or forward, which this function cannot rebuild.

    Example::

        from lightning_sgmcmc.singular import learning_coefficient

        net = torch.nn.Linear(2, 3)  # trained
        data = torch.randn(100, 2), torch.randint(3, (100,))
        found = learning_coefficient(net, data, Categorical(), gamma=1.0, lr=0.1, num_steps=100, seed=0)
        value, error, verdict = found.value, found.standard_error, found.verdict

    Source: Lau, Furman, Wang, Murfet & Wei 2023 (The Local Learning Coefficient, arXiv 2308.12108).
    """
    check_count("num_steps", num_steps, optional=False)
    check_count("batch_size", batch_size, optional=False)
    check_within("burn_in", burn_in, "[0, 1)")
    if isinstance(network, BayesianModule):
        likelihood = likelihood if likelihood is not None else network.likelihood
        network = _plain_network(network)
    source = _source(data, batch_size, seed)
    callback = LearningCoefficient(loss)
    schedule = SamplingSchedule(burn_in_steps=int(burn_in * num_steps), every_n_steps=every_n_steps)
    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": num_steps,
        "max_epochs": -1,
    } | dict(trainer or {})
    fitted = pl.Trainer(**(options | {"callbacks": [schedule, callback, *options.get("callbacks", [])]}))
    made = bayesianize(
        copy.deepcopy(network),
        what,
        copy.deepcopy(likelihood),
        checkpoint=checkpoint,
        sampler=sampler,
        lr=lr,
        num_chains=num_chains,
        seed=seed,
        **(localized(_count(source), gamma, nbeta) | dict(module or {})),
    )
    if isinstance(source, pl.LightningDataModule):
        fitted.fit(made, datamodule=source)
    else:
        fitted.fit(made, source)
    assert callback.result is not None, "the schedule has drawn samples"
    return callback.result


def _plain_network(module: BayesianModule) -> nn.Module:
    own = [name for name in ("forward", "log_likelihood", *HOOKS) if overrides(module, name)]
    if own or "net" not in module._modules or module.chains.stacked is not None:
        why = f"defines {own[0]}" if own else "has no single network"
        raise TypeError(
            f"{type(module).__name__} {why}: make it with **localized(num_data, gamma), and fit it with the callback "
            "LearningCoefficient"
        )
    net = module.net
    assert isinstance(net, nn.Module)
    return net


def _source(data: Any, batch_size: int, seed: int | None) -> Any:
    """Return a datamodule or a loader."""
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        data = TensorBatches(*data)
    if isinstance(data, Dataset):
        return ResumableLoader(data, min(batch_size, len(cast(Sized, data))), seed)
    return data


def _count(source: Any) -> int:
    """Return n, the number of training data."""
    loader = source
    if isinstance(source, pl.LightningDataModule):
        source.prepare_data()
        source.setup("fit")
        loader = source.train_dataloader()
    dataset = getattr(loader, "dataset", None)
    count = getattr(source, "num_data", None)
    if count is None and isinstance(dataset, Sized):
        count = len(dataset)
    if count is None:
        raise ValueError(
            f"data of class {type(source).__name__} has no known length: pass a data set with a length, a loader of "
            "one, or a datamodule with num_data"
        )
    return int(count)
