"""What a run tells its loggers of itself: its settings, and which weights are traced; W&B without a login."""

import inspect
import os
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.logging import log_values
from lightning_sgmcmc.chains.trainer import callbacks_of
from lightning_sgmcmc.fit.results import versions
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import mean_of

# -- offline -----------------------------------------------------------------------------------------------------------


def stay_offline_without_login(loggers: Iterable[Logger]) -> None:
    """Make W&B loggers, before their experiments start, record offline if no user is logged in and no mode chosen."""
    undecided = [
        logger
        for logger in loggers
        if isinstance(logger, WandbLogger)
        and logger._experiment is None
        and not logger._offline
        and logger._wandb_init.get("mode") is None
    ]
    if undecided and not os.environ.get("WANDB_MODE") and not _logged_in():
        for logger in undecided:
            logger._wandb_init["mode"] = "offline"  # W&B reads WANDB_MODE before it prompts for a login
        rank_zero_info(
            "No user is logged in to W&B, so this run is recorded offline: `wandb sync` uploads it later, and "
            "`wandb login` records the next run online."
        )


def _logged_in() -> bool:
    """Return whether W&B has credentials, without a prompt and without the network."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def log_settings(trainer: pl.Trainer, model: EnergyModel, settings: dict[str, Any]) -> None:
    """Write a run's settings to every logger, as `run.…`, once its sampler, N and seed are known."""
    if trainer.loggers:
        log_values(trainer, "run", hyperparameters_of(trainer, model, settings))


def hyperparameters_of(trainer: pl.Trainer, model: EnergyModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what determines a run's draws, by name: its settings (`sampler.friction`, …), sizes and versions."""
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


# -- traces ------------------------------------------------------------------------------------------------------------


TRACED_WEIGHTS = 4


def traced_weights(module: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return, by name, up to four tensors and an index in each, spread over the network, the same in every run."""
    tensors = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    count = min(TRACED_WEIGHTS, len(tensors))
    traced: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for turn in range(count):
        name, tensor = tensors[round(turn * (len(tensors) - 1) / max(count - 1, 1))]
        place = derive_seed(0, "trace", name) % tensor.numel()
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
        traced[f"{name}[{', '.join(map(str, index))}]"] = (tensor, index)
    return traced


def named_step_sizes(sampler: Sampler) -> dict[str, float]:
    """Return the step sizes by name pattern as scalars, none if all parameters have one."""
    return {f"sampler/lr/{group['name']}": mean_of(group["lr"]) for group in sampler.param_groups if "name" in group}
