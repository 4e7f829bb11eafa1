"""Writes the predictions of `trainer.predict` to a file."""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves

from lightning_sgmcmc.chains.trainer import run_folder
from lightning_sgmcmc.files import free_name, is_regular, replacing
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.predictions import ON_REQUEST, Prediction

BasePredictionWriter = pl.callbacks.BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Writes the posterior predictive of `trainer.predict` to `predictions.safetensors` in the run's folder.

    It holds one tensor per part of the `Prediction` (`probabilities`, `entropy`, …), with the data along the first axis
    in the order of the loader. With several ranks each writes its own file, `predictions-rank-….safetensors`, with the
    data's positions in `index`. Earlier predictions in the folder are kept as `predictions-1.safetensors`, ….

    Args:
        original_units: whether predictions of standardised targets are in the data's units, as `Posterior.predict`
            returns them; otherwise in those of the standardised targets.
    """

    def __init__(self, original_units: bool = True) -> None:
        super().__init__("epoch")
        self.original_units = original_units

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.original_units and isinstance(pl_module, BayesianModule) and pl_module.posterior is not None:
            pl_module.posterior = pl_module.posterior.standardised()

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        folder = run_folder(trainer)
        parts = [p for p in tree_leaves(predictions) if isinstance(p, Prediction)]
        if not parts:
            return
        tensors = {}
        for part in parts[0].parts:
            axis = 1 if part.startswith(ON_REQUEST) else 0
            tensors[part] = torch.cat([p.parts[part] for p in parts], axis).cpu().contiguous()
        name = "predictions.safetensors"
        if trainer.world_size > 1:
            tensors["index"] = torch.tensor(tree_leaves(batch_indices))
            name = f"predictions-rank-{trainer.global_rank}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        if is_regular(folder / name):
            (folder / name).rename(free_name(folder / name))
        with replacing(folder / name) as temporary:
            save_file(tensors, temporary)
        rank_zero_info(f"Predictions for {len(next(iter(tensors.values())))} data: {folder / name}")
