"""A regression by samples of the posterior and by an ensemble, at the same processor time."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning

if TYPE_CHECKING:
    from lightning_sgmcmc.datamodules import ArrayDataModule

    MakeData = Callable[[int], ArrayDataModule]

METHODS = ("posterior", "ensemble")


@dataclass(frozen=True)
class Setting:
    """The network and the training of both methods.

    Attributes:
        hidden: widths of the hidden layers.
        activation: a class of `torch.nn`.
        likelihood: "gaussian" or "student" with a learned noise, or "heteroscedastic".
        std: initial scale of the noise, in standardised targets.
        min_std: the smallest scale of "heteroscedastic", which bounds the curvature and with it the stable step size.
        prior_std: of the Gaussian prior, which is the weight decay of the optimizer.
        batch_size, warm_steps, warm_lr: mini-batches, steps and step size of AdamW.
        members: of the ensemble; more than `chains`, for the time that the sampling takes.
        chains: optimized networks from which chains of the posterior start.
        sampling_batch: data per step of the sampler; more than there are is all.
        sampling_steps, friction: of `UnderdampedLangevin`.
        step: time step h of the sampler in units of the narrowest direction's width, s/√N for N data, where s is the
            noise (its 10 % quantile over the training data, standardised) that the optimized networks have found.
        burn_in: share of the sampling steps before the first sample.
        samples: samples of all chains.
    """

    hidden: tuple[int, ...]
    activation: str = "Tanh"
    likelihood: str = "heteroscedastic"
    std: float = 0.7
    min_std: float = 0.01
    prior_std: float = 1.0
    batch_size: int = 100
    warm_steps: int = 10_000
    warm_lr: float = 5e-3
    members: int = 40
    chains: int = 8
    sampling_batch: int = 2000
    sampling_steps: int = 20_000
    step: float = 0.1
    friction: float = 5.0
    burn_in: float = 0.25
    samples: int = 400

    @property
    def steps(self) -> int:
        """The steps of all networks of both methods."""
        return self.members * self.warm_steps + self.chains * (self.warm_steps + self.sampling_steps)


def fit_and_score(data: "MakeData", method: str, setting: Setting, seed: int) -> dict[str, float]:
    """Return the metrics of the average on the test data, in the target's own units, and the fits' cost.

    Args:
        data: returns the datamodule for a batch size; targets (n, 1), standardised.
        method: "posterior", samples at temperature 1 by chains that start at `chains` optimized networks, or
            "ensemble", `members` optimized networks.
        setting: the network and its training.
        seed: of the starts, the batches and the noise.

    Returns:
        `rmse`, `nll`, `coverage_90` and `width_90` of the central 90 % interval, `standardised_rmse` and
        `standardised_nll` in units of the training targets' standard deviation, `gradients` (per-datum, of all chains)
        and `seconds` of one processor, both of all fits.
    """
    import torch
    from torch.optim import AdamW

    from lightning_sgmcmc import UnderdampedLangevin
    from lightning_sgmcmc.callbacks import DeepEnsemble, SamplingSchedule

    torch.set_num_threads(1)
    silence_lightning()
    torch.manual_seed(seed)
    start = time.process_time()
    networks = setting.chains if method == "posterior" else setting.members
    ensemble = DeepEnsemble(optimizer=functools.partial(AdamW, fused=True))
    batches = data(setting.batch_size)
    batches.setup("fit")
    starts = [start_of(batches.input_shape[0], setting) for _ in range(networks)]
    module = fit(batches, ensemble, setting, setting.warm_steps, seed=seed, chain_start=starts, lr=setting.warm_lr)
    gradients = module.chains.counters.gradient_evaluations * networks
    if method == "posterior":
        noise = float(module.posterior.standardised().predict(batches.splits[0].inputs).aleatoric.quantile(0.1))
        burn_in = round(setting.burn_in * setting.sampling_steps)
        every = max(1, (setting.sampling_steps - burn_in) * networks // setting.samples)
        module = fit(
            data(setting.sampling_batch),
            SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every),
            setting,
            setting.sampling_steps,
            seed=seed,
            chain_start=[sample.state for sample in module.posterior],
            sampler=functools.partial(UnderdampedLangevin, friction=setting.friction, integrator="baoab"),
            lr=setting.step * noise / math.sqrt(batches.num_data),
        )
        gradients += module.chains.counters.gradient_evaluations * networks
    seconds = time.process_time() - start
    return metrics_of(module.posterior, batches) | {"gradients": float(gradients), "seconds": seconds}


def fit(data: "ArrayDataModule", schedule: Any, setting: Setting, steps: int, **options: Any) -> Any:
    """Return the module after a fit, with its samples in memory.

    Args:
        data: for training.
        schedule: the callback that sets the stages.
        setting: the network.
        steps: length of the fit.
        options: of `BayesianModule`, with a list as `chain_start`.
    """
    from lightning_sgmcmc import BayesianModule, GaussianPrior

    data.setup("fit")
    module = BayesianModule(
        net=network(data.input_shape[0], setting),
        likelihood=likelihood_of(setting),
        prior=GaussianPrior(setting.prior_std),
        num_chains=len(options["chain_start"]),
        chain_execution="vmap",
        **options,
    )
    trainer = quiet_trainer(
        accelerator="cpu", max_steps=steps, limit_val_batches=0, callbacks=[schedule, kept_samples()]
    )
    resumed_fit(trainer, module, data)
    return module


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
    """Return linear layers with the activation between them, weights from N(0, 1/fan_in) and biases 0.

    torch's own start is narrower by √3, which through five layers begins with nearly constant functions.
    """
    from torch import nn

    layers: list[nn.Module] = []
    outputs = 2 if setting.likelihood == "heteroscedastic" else 1
    for width in (*setting.hidden, outputs):
        layer = nn.Linear(inputs, width)
        nn.init.normal_(layer.weight, std=inputs**-0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, getattr(nn, setting.activation)()]
        inputs = width
    return nn.Sequential(*layers[:-1])


def start_of(inputs: int, setting: Setting) -> dict[str, Any]:
    """Return the state of a new network and its likelihood."""
    parts = {"net": network(inputs, setting), "likelihood": likelihood_of(setting)}
    return {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.state_dict().items()}


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
