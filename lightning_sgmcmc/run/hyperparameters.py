"""The settings of a run, as hyperparameters for loggers."""

import os
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.saving import save_hparams_to_yaml
from pytorch_lightning.loggers import TensorBoardLogger

from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.files import MASK, is_secret, text_without_secrets
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.run.origin import versions
from lightning_sgmcmc.run.results import markdown_table
from lightning_sgmcmc.run.settings import Settings
from lightning_sgmcmc.run.trainer import callbacks_of


def log_settings(trainer: pl.Trainer, model: EnergyModel, settings: Settings) -> None:
    """Write a run's settings to every logger, as `run.…`, once its sampler, N and seed are known.

    Args:
        trainer: the run's.
        model: the run's module.
        settings: the result of `settings_of`.
    """
    if trainer.loggers:
        log_values(trainer, "run", hyperparameters_of(trainer, model, settings))


def log_plan(trainer: pl.Trainer, plan: RunPlan) -> None:
    """Write a run's plan to every logger: its kind and its known numbers, as `plan.…`."""
    log_values(trainer, "plan", {"kind": plan.name or "unknown", **plan.scalars()})


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


def hyperparameters_of(trainer: pl.Trainer, model: EnergyModel, settings: Settings) -> dict[str, Any]:
    """Return what determines a run's draws, by name: its settings (`sampler.friction`, `schedule.num_cycles`, …), the
    module's own arguments, the number of chains and of sampled parameters, the trainer's options, and versions."""
    chains = chains_of(model)
    plain = {k: v for k, v in model.recorded_arguments().items() if isinstance(v, str | int | float | bool)}
    known = {name: value for name, value in settings.items() if name != "data"}
    return {
        "model": type(model).__name__,
        **plain,
        **known,
        "num_chains": chains.layout.total_chains,
        "num_parameters": sum(p.numel() for p in chains.trainable.values()) // chains.num_chains,
        "callbacks": ", ".join(type(callback).__name__ for callback in callbacks_of(trainer)),
        "batch_size": getattr(trainer.train_dataloader, "batch_size", None),
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_steps": trainer.estimated_stepping_batches,
        **{f"version.{name}": found or "unknown" for name, found in versions().items()},
    }


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: text_without_secrets(value) if isinstance(value, str) else value for name, value in values.items()}
    return {name: MASK if is_secret(name) and isinstance(value, str) else value for name, value in texts.items()}


def _show_in_tensorboard(logger: TensorBoardLogger, part: str, known: Mapping[str, Any]) -> None:
    """Show values as text, and write them to `hparams.yaml`."""
    rows = [[name, str(value)] for name, value in known.items()]
    logger.experiment.add_text(part, markdown_table(["setting", "value"], rows))
    save_hparams_to_yaml(os.path.join(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)
