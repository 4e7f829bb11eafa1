"""Base class and checks shared by the library's callbacks."""

from typing import Any

import pytorch_lightning as pl
import torch

from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample
from lightning_sgmcmc.checks import is_of_other_namespace, names_arguments
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.settings import changed_arguments


class SamplerCallback(RunCallback):
    """A callback of a sampling run: it may set the sampler's controls, and it sees every posterior sample.

    The order in a step: `on_train_batch_start` (schedules set `lr` and `temperature`), `on_before_optimizer_step`
    (the energy of the batch is known; multipliers are set), the update, `on_train_batch_end` (schedules decide
    whether the states are samples), and then `on_posterior_samples` and, once per chain, `on_posterior_sample`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_arguments(cls)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise for a module that does not sample; reset at the start of a fit.

        Raises:
            TypeError: if the module is not a `BayesianModule`.
        """
        bayesian(pl_module, self)
        if stage == "fit":
            self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in changed_arguments(self))})"

    def reset(self) -> None:
        """Clear the state of an earlier fit; a checkpoint's state is loaded afterwards."""

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: BayesianModule, drawing: Drawing) -> None:
        """Called with all samples of a step, for work that is done together; `on_posterior_sample` follows with each.

        A step with more samples than the process has chains has several drawings.
        """

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        """Called with each sample when it is drawn."""


class StepClaimant(SamplerCallback):
    """A callback with a claim that is called before an update; it calls all such claims in the order of a step.

    Only these callbacks have the hook, since each call of it costs a microsecond or two in every step.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        chains_of(pl_module).claims.before_update(trainer)


def bayesian(module: pl.LightningModule, callback: pl.Callback) -> BayesianModule:
    """Return the module, typed as a `BayesianModule`.

    Raises:
        TypeError: if it is none.
    """
    if is_of_other_namespace(module):
        raise TypeError(
            f"{type(module).__name__} comes from lightning.pytorch, but {type(callback).__name__} from "
            "pytorch_lightning, and the two do not mix: import Trainer and modules from pytorch_lightning"
        )
    if not isinstance(module, BayesianModule):
        raise TypeError(
            f"{type(callback).__name__} works with a BayesianModule, got {type(module).__name__}: derive it from "
            "lightning_sgmcmc.BayesianModule, or wrap the network as BayesianModule(net=…)"
        )
    return module


def refuse_loss_scaler(trainer: pl.Trainer, why: str) -> None:
    """Raise for a run with a loss scaler.

    Args:
        trainer: the run's.
        why: how the callback uses gradients, the beginning of the message.

    Raises:
        ValueError: if the run has one.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"{why}, but a loss scaler rescales them and makes some infinite: use "
            "precision='bf16-mixed' instead of '16-mixed'"
        )
