"""The units of a run's data: those of its store, which a trainer's datamodule must share."""

from typing import Any, TypeVar

import pytorch_lightning as pl

from lightning_sgmcmc.posterior.stored import StoredSamples
from lightning_sgmcmc.tables import TargetScaling

Samples = TypeVar("Samples", bound=StoredSamples)


def scaling_of_run(trainer: pl.Trainer, module: Any) -> TargetScaling:
    """Return the scaling of a run's targets: in a fit its datamodule's, afterwards that of the stored samples.

    A store that does not know it, such as one of an early version, leaves it to the datamodule.

    Args:
        trainer: the run's.
        module: its `BayesianModule`.
    """
    store = getattr(getattr(module, "posterior", None), "store", None)
    known = None if store is None or trainer.state.fn == "fit" else store.scaling
    return known or TargetScaling.of_datamodule(getattr(trainer, "datamodule", None)) or TargetScaling()


def ready_to_predict(posterior: Samples, trainer: pl.Trainer) -> Samples:
    """Return a posterior with its samples in memory, for all batches of `trainer.predict`.

    Raises:
        ValueError: if the inputs of the trainer's datamodule have other columns or units than those of the fit.
    """
    posterior.columns.check(getattr(trainer, "datamodule", None), targets=False)
    return posterior.in_memory()
