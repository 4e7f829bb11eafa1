"""The local learning coefficient of a trained network by one call, and the target that it samples."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks.schedule import SamplingSchedule
from lightning_sgmcmc.checks import check_count, check_positive, check_within
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.evaluation.passes import Kind
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import HOOKS, overrides
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.pretrained import bayesianize
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.samplers import SGLD, Sampler
from lightning_sgmcmc.singular.callback import LearningCoefficient
from lightning_sgmcmc.singular.estimate import LearningCoefficientEstimate
from lightning_sgmcmc.tensors import copied, widest


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


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


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
    options: dict[str, Any] = QUIET | {"max_steps": num_steps, "max_epochs": -1} | dict(trainer or {})
    fitted = pl.Trainer(**(options | {"callbacks": [schedule, callback, *options.get("callbacks", [])]}))
    chosen: dict[str, Any] = {"sampler": sampler, "lr": lr, "num_chains": num_chains, "seed": seed}
    chosen |= localized(_count(source), gamma, nbeta) | dict(module or {})
    made = bayesianize(copied(network), what, copy.deepcopy(likelihood), checkpoint=checkpoint, **chosen)
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


# -- closed forms ------------------------------------------------------------------------------------------------------


class LearningCoefficientTruth(NamedTuple):
    """A learning coefficient.

    Attributes:
        value: λ, the real log canonical threshold.
        multiplicity: m, the order of its pole: E[n·β·(L - L(w*))] = λ - (m - 1)/log(n·β) + ….
    """

    value: float
    multiplicity: int = 1


def regular_learning_coefficient(hessian: Tensor, nbeta: float, gamma: float = 0.0) -> float:
    """Return E[n·β·(L(w) - L(w*))] of a quadratic loss with minimum w* under the localised law, in closed form.

        Σ_i n·β·h_i/(2·(n·β·h_i + γ)),   h_i the eigenvalues of the Hessian of the mean loss

    It tends to d/2, the coefficient of a regular model of d parameters, as γ → 0.

    Args:
        hessian: of the mean loss L at w*, shape (d, d), not negative.
        nbeta: n·β > 0.
        gamma: γ ≥ 0.

    >>> regular_learning_coefficient(torch.eye(4), nbeta=1000.0)
    2.0
    >>> round(regular_learning_coefficient(torch.eye(4), nbeta=1000.0, gamma=100.0), 3)
    1.818
    """
    check_positive("nbeta", nbeta)
    curvatures = torch.linalg.eigvalsh(widest(hessian)).clamp(min=0)
    curvatures = curvatures[curvatures > 0]
    return float((nbeta * curvatures / (2 * (nbeta * curvatures + gamma))).sum())


def reduced_rank_learning_coefficient(inputs: int, hidden: int, outputs: int, rank: int) -> LearningCoefficientTruth:
    """Return λ of reduced-rank regression y = B·A·x + noise, where the true B·A has a lower rank than A and B allow.

    It is the global coefficient, the least over all true parameters. The local one has this value where A and B have
    the rank of the truth, and may be larger at other points with the same product.

    Args:
        inputs: M, columns of A.
        hidden: H, rows of A.
        outputs: N, rows of B.
        rank: r of the true product, 0 ≤ r ≤ H.

    Raises:
        ValueError: for a rank above one of the widths.

    Source: Aoyagi & Watanabe 2005 (Stochastic complexities of reduced rank regression in Bayesian estimation, Main
    Theorem).

    >>> reduced_rank_learning_coefficient(inputs=5, hidden=4, outputs=3, rank=2).value
    7.0
    """
    _check_rank((inputs, hidden, outputs), rank)
    m, h, n, r = inputs, hidden, outputs, rank
    if n + r <= m + h and m + r <= n + h and h + r <= m + n:
        odd = (m + h + n + r) % 2
        sum_of = -((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n
        return LearningCoefficientTruth((sum_of + odd) / 8, 1 + odd)
    if m + h < n + r:
        return LearningCoefficientTruth((h * m - h * r + n * r) / 2)
    if n + h < m + r:
        return LearningCoefficientTruth((h * n - h * r + m * r) / 2)
    return LearningCoefficientTruth(m * n / 2)


def deep_linear_learning_coefficient(widths: Sequence[int], rank: int) -> LearningCoefficientTruth:
    """Return λ of a deep linear network y = W_L ⋯ W_1·x + noise, where the true product has a rank r.

        λ = (r·(H_0 + H_L) - r²)/2 + a·(ℓ - a)/(4·ℓ) - (ℓ - 1)/(4·ℓ)·S² + ½·Σ_{i<j} M_i·M_j

    with M_i = H_i - r over the ℓ + 1 widths that limit the product, S their sum, and a = S - (⌈S/ℓ⌉ - 1)·ℓ. The
    multiplicity is a·(ℓ - a) + 1. It is the global coefficient, as in `reduced_rank_learning_coefficient`.

    Args:
        widths: H_0, …, H_L, from the inputs to the outputs, at least two.
        rank: r, at most the least width.

    Raises:
        ValueError: for fewer than two widths, or a rank above one of them.

    Source: Aoyagi 2024 (Consideration on the learning efficiency of multiple-layered neural networks with linear
    units, Neural Networks 172, main theorem).

    >>> deep_linear_learning_coefficient([5, 4, 3], rank=2).value  # as reduced-rank regression
    7.0
    >>> deep_linear_learning_coefficient([4, 3, 3, 3], rank=1)
    LearningCoefficientTruth(value=4.5, multiplicity=1)
    """
    _check_rank(widths, rank)
    if len(widths) < 2:
        raise ValueError(f"widths must have at least two entries, the inputs and the outputs, got {list(widths)}")
    excess = sorted(width - rank for width in widths)
    # The limiting widths are the smallest, so it suffices to know how many there are.
    for count in range(2, len(excess) + 1):
        chosen, others = excess[:count], excess[count:]
        least, total, order = min(others, default=None), sum(chosen), count - 1
        if total >= order * chosen[-1] and (least is None or (chosen[-1] < least and total < order * least)):
            break
    pairs = sum(i * j for i, j in itertools.combinations(chosen, 2))
    remainder = total - (-(-total // order) - 1) * order
    value = (rank * (widths[0] + widths[-1]) - rank**2) / 2 + remainder * (order - remainder) / (4 * order)
    value += pairs / 2 - (order - 1) / (4 * order) * total**2
    return LearningCoefficientTruth(value, remainder * (order - remainder) + 1)


def _check_rank(widths: Sequence[int], rank: int) -> None:
    for width in widths:
        check_count("widths", width, optional=False)
    check_count("rank", rank, least=0, optional=False)
    if rank > min(widths):
        raise ValueError(f"rank must be at most the least width {min(widths)}, got {rank}")
