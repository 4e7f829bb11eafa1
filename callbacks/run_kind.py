"""What a run is, in a word or two."""

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks.mc_dropout import MCDropout
from lightning_sgmcmc.callbacks.schedule import is_optimization, schedule_of
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.trainer import callbacks_of


def run_kind(trainer: pl.Trainer, module: BayesianModule) -> str:
    """Return what a run's samples are: the name of a baseline, the plan's kind of run, or "posterior samples"."""
    if any(isinstance(callback, MCDropout) for callback in callbacks_of(trainer)):
        return MCDropout.kind
    own = getattr(schedule_of(trainer), "kind", None)
    planned = getattr(getattr(module, "plan", None), "kind", None)
    if own is not None or planned is not None:
        return str(own if own is not None else getattr(planned, "value", planned))
    return "snapshot ensemble" if is_optimization(trainer, module) else "posterior samples"
