"""Error and negative log likelihood along straight lines between samples."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import flat_loaders
from lightning_sgmcmc.chains.execution import evaluation_mode, undisturbed_generators
from lightning_sgmcmc.diagnostics.geometry import interpolate, segment_pairs
from lightning_sgmcmc.evaluation.loader_average import metrics_of
from lightning_sgmcmc.evaluation.scoring import EvaluationShare, evaluate, of_observed
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.tables import TargetScaling

Segment = tuple[str, str, dict[str, list[float]]]


class SegmentWalk:
    """Evaluates points on the segments between chosen pairs of samples, each segment once, on the first batches of this
    process's share of the data; parameters and floating-point buffers are interpolated."""

    def __init__(self, pairs: int, points: int, batches: int) -> None:
        self.pairs = pairs
        self.batches = batches
        self.positions = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
        self._known: dict[tuple[Any, ...], dict[str, list[float]]] = {}

    def walk(self, trainer: pl.Trainer, module: EnergyModel, posterior: Posterior | None, stage: str) -> list[Segment]:
        """Return kind, name and values of each segment on the data of a stage; empty without samples, pairs or data."""
        if posterior is None or self.pairs == 0:
            return []
        records = posterior.records
        chosen = segment_pairs([(record.chain, record.cycle) for record in records], self.pairs)
        segments: list[Segment] = []
        data: list[Any] | None = None
        with undisturbed_generators(module), evaluation_mode(module):
            for first, second, kind in chosen:
                ends = [(records[i].step, records[i].chain) for i in (first, second)]
                key = (stage, *ends)
                if key not in self._known:
                    data = self._data(trainer, module, stage) if data is None else data
                    if not data:
                        return []
                    self._known[key] = self._walk_one(trainer, module, posterior, (first, second), data)
                segments.append((kind, f"step {ends[0][0]} to step {ends[1][0]}", self._known[key]))
        return segments

    def _data(self, trainer: pl.Trainer, module: EnergyModel, stage: str) -> list[Any]:
        loaders = flat_loaders(trainer.test_dataloaders if stage == "test" else trainer.val_dataloaders)
        limits = trainer.num_test_batches if stage == "test" else trainer.num_val_batches
        if not loaders or not limits:
            return []
        return list(EvaluationShare(loaders[0], min(self.batches, limits[0])).batches(trainer, module))

    def _walk_one(
        self, trainer: pl.Trainer, module: EnergyModel, posterior: Posterior, ends: tuple[int, int], data: list[Any]
    ) -> dict[str, list[float]]:
        first, second = ({k: t.to(module.device) for k, t in posterior[i].state.items()} for i in ends)
        scaling = scaling_of_run(trainer, module)
        values: dict[str, list[float]] = {}
        for position in self.positions:
            state: dict[str, Tensor] = interpolate(first, second, position)
            with trainer.strategy.precision_plugin.val_step_context():
                terms, log_density, target = of_observed(module, evaluate(module, state, data))
            metrics = metrics_of(module, terms, log_density, target, scaling)
            if "accuracy" in metrics:
                values.setdefault("error", []).append(1 - metrics["accuracy"])
            elif "rmse" in metrics:
                values.setdefault("RMSE", []).append(metrics["rmse"])
            if "nll" in metrics:
                values.setdefault("NLL (nats per example)", []).append(metrics["nll"])
        return values


# -- units -------------------------------------------------------------------------------------------------------------


def scaling_of_run(trainer: pl.Trainer, module: EnergyModel) -> TargetScaling:
    """Return the scaling of a run's targets: in a fit its datamodule's, afterwards that of the samples, if known."""
    store = getattr(getattr(module, "posterior", None), "store", None)
    known = None if store is None or trainer.state.fn == "fit" else store.scaling
    return known or TargetScaling.of_datamodule(getattr(trainer, "datamodule", None)) or TargetScaling()
