"""The units of a run's targets."""

from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.tables import TargetScaling


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
