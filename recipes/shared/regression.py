"""A regression by samples of the posterior and by an ensemble, at the same number of gradient evaluations."""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.recipes.shared.jobs import quiet_trainer, silence_lightning

if TYPE_CHECKING:
    from lightning_sgmcmc.datamodules import ArrayDataModule

METHODS = ("posterior", "ensemble")


@dataclass(frozen=True)
class Setting:
    """The network and its training, the same for both methods except for what follows the warm start.

    Attributes:
        hidden: widths of the hidden layers.
        activation: a class of `torch.nn`.
        likelihood: "gaussian" or "student" with a learned noise, or "heteroscedastic".
        std: initial scale of the noise, in standardised targets.
        min_std: the smallest scale of "heteroscedastic", which bounds the curvature and with it the stable step size.
        chains: chains of the posterior, and members of the ensemble.
        epochs: length of a run.
        share: of the run that is the warm start of the posterior.
        warm_lr, lr: step sizes of AdamW and of SGHMC.
        prior_std: of the Gaussian prior, which is the weight decay of both.
        samples: samples of all chains.
    """

    hidden: tuple[int, ...]
    activation: str = "SiLU"
    likelihood: str = "gaussian"
    std: float = 0.1
    min_std: float = 0.03
    chains: int = 8
    epochs: int = 2000
    share: float = 0.5
    warm_lr: float = 1e-2
    lr: float = 2e-4
    prior_std: float = 1.0
    samples: int = 200


def fit_and_score(data: "ArrayDataModule", method: str, setting: Setting, seed: int) -> dict[str, float]:
    """Return the metrics of the average on the test data, in the target's own units, and the fit's cost.

    Args:
        data: targets (n, 1), standardised.
        method: "posterior", samples at temperature 1 after a warm start, or "ensemble", networks that AdamW trains for
            as many steps.
        setting: the network and its training.
        seed: of the starts, the batches and the noise.

    Returns:
        `rmse`, `nll`, `coverage_90` and `width_90` of the central 90 % interval, `standardised_rmse` and
        `standardised_nll` in units of the training targets' standard deviation, `gradients` (per-datum, of all chains)
        and `seconds` of one processor.
    """
    import pytorch_lightning as pl
    import torch
    from torch.optim import AdamW

    from lightning_sgmcmc import SGHMC, BayesianModule, GaussianPrior
    from lightning_sgmcmc.callbacks import DeepEnsemble, SampleCollector, SamplingSchedule, WarmStart

    torch.set_num_threads(1)
    silence_lightning()
    data.setup("fit")
    torch.manual_seed(seed)
    steps = setting.epochs * math.ceil(data.num_data / data.batch_size)
    optimizer = functools.partial(AdamW, fused=True)
    callbacks: list[pl.Callback] = [DeepEnsemble(optimizer=optimizer)]
    if method == "posterior":
        warm = round(setting.share * steps)
        burn_in = (steps - warm) // 5
        every = max(1, (steps - warm - burn_in) * setting.chains // setting.samples)
        schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every)
        callbacks = [WarmStart(optimizer, setting.warm_lr, warm, lr_schedule="cosine"), schedule]
    module = BayesianModule(
        net=network(data.input_shape[0], setting),
        likelihood=likelihood_of(setting),
        prior=GaussianPrior(setting.prior_std),
        sampler=functools.partial(SGHMC, friction=0.1),
        lr=setting.lr if method == "posterior" else setting.warm_lr,
        num_chains=setting.chains,
        chain_execution="vmap",
        seed=seed,
    )
    trainer = quiet_trainer(
        accelerator="cpu", max_steps=steps, limit_val_batches=0, callbacks=[*callbacks, SampleCollector(in_memory=True)]
    )
    start = time.process_time()
    trainer.fit(module, datamodule=data)
    seconds = time.process_time() - start
    assert module.posterior is not None
    found = metrics_of(module.posterior, data)
    gradients = module.chains.counters.gradient_evaluations * setting.chains
    return found | {"gradients": float(gradients), "seconds": seconds}


def metrics_of(posterior: Any, data: "ArrayDataModule") -> dict[str, float]:
    """Return the metrics of a posterior's average on the test data."""
    test, std = data.splits[2], data.target_std or 1.0
    y = test.targets * std + (data.target_mean or 0.0)
    prediction = posterior.predict(test.inputs)
    low, high = prediction.interval(0.9)
    rmse, nll = float((prediction.mean - y).square().mean().sqrt()), -float(prediction.log_prob(y).mean())
    return {
        "rmse": rmse,
        "nll": nll,
        "standardised_rmse": rmse / std,
        "standardised_nll": nll - math.log(std),
        "coverage_90": float(((low <= y) & (y <= high)).double().mean()),
        "width_90": float((high - low).mean()),
    }


def network(inputs: int, setting: Setting) -> Any:
    """Return linear layers with the activation between them."""
    from torch import nn

    layers: list[nn.Module] = []
    for width in setting.hidden:
        layers += [nn.Linear(inputs, width), getattr(nn, setting.activation)()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 2 if setting.likelihood == "heteroscedastic" else 1))


def likelihood_of(setting: Setting) -> Any:
    """Return the likelihood of a setting."""
    from lightning_sgmcmc import Gaussian, HeteroscedasticGaussian, StudentT

    if setting.likelihood == "heteroscedastic":
        return HeteroscedasticGaussian(setting.std, setting.min_std)
    if setting.likelihood == "student":
        return StudentT(4.0, setting.std, learned=True)
    return Gaussian(setting.std, learned=True)


def means(outcomes: Sequence[dict[str, float]], name: str) -> list[float]:
    """Return one metric of several outcomes."""
    return [outcome[name] for outcome in outcomes]
