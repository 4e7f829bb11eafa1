"""Numbers and settings of a run, written to its loggers."""

import os
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.saving import save_hparams_to_yaml
from pytorch_lightning.loggers import TensorBoardLogger

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.trainer import log_interval
from lightning_sgmcmc.files import MASK, is_secret, text_without_secrets
from lightning_sgmcmc.plain import markdown_table


def is_logged(trainer: pl.Trainer, chains: Chains, step_count: int) -> bool:
    """Return whether `trainer.log_every_n_steps` logs the step just made, number `step_count`."""
    return not chains.accumulation.accumulating and step_count % log_interval(trainer) == 0


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Write numbers to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_cost(trainer: pl.Trainer, chains: Chains) -> None:
    """Write the cost of the run to every logger.

    `sampler/gradient_evaluations` counts the per-datum gradients that each chain has computed;
    `sampler/data_passes` is that number divided by N.
    """
    evaluations = chains.counters.gradient_evaluations
    scalars = {
        "sampler/gradient_evaluations": float(evaluations),
        "sampler/data_passes": evaluations / chains.observed.num_data,
    }
    log_scalars(trainer, scalars, trainer.global_step)


def log_values(trainer: pl.Trainer, part: str, known: Mapping[str, Any]) -> None:
    """Write values that a run has found to every logger, as hyperparameters `part.…`, beside the user's own.

    `Trainer(enable_autolog_hparams=False)` writes none.
    """
    if not trainer.enable_autolog_hparams:
        return
    known = _without_secrets(known)
    values = {f"{part}.{name}": value for name, value in known.items()}
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(values)
            continue
        if logger.hparams:  # TensorBoard keeps a run's first ones
            logger.hparams.update(values)
        else:
            logger.log_hyperparams(values)
        if trainer.is_global_zero:
            _show_in_tensorboard(logger, part, known)


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: text_without_secrets(value) if isinstance(value, str) else value for name, value in values.items()}
    return {name: MASK if is_secret(name) and isinstance(value, str) else value for name, value in texts.items()}


def _show_in_tensorboard(logger: TensorBoardLogger, part: str, known: Mapping[str, Any]) -> None:
    """Show values as text, and write them to `hparams.yaml`."""
    rows = [[name, str(value)] for name, value in known.items()]
    logger.experiment.add_text(part, markdown_table(["setting", "value"], rows))
    save_hparams_to_yaml(os.path.join(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)
