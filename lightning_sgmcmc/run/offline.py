"""Runs without a login: W&B records offline, so that no run blocks on a login or a network."""

import inspect
import os
from collections.abc import Iterable

from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_info


def stay_offline_without_login(loggers: Iterable[Logger]) -> None:
    """Make W&B loggers record offline if no user is logged in and no mode was chosen.

    It must be called before a logger's experiment starts, since W&B would ask for a login then.
    """
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
