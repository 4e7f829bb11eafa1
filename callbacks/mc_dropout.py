"""Monte Carlo dropout: the dropout masks of trained networks as samples."""

from collections.abc import Iterator
from dataclasses import replace

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.callbacks.schedule import require_schedule
from lightning_sgmcmc.chains.callback import Place
from lightning_sgmcmc.chains.execution import MASK_SEED, dropout_layers
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.seeding import derive_seed

WITHOUT_MASK = (nn.MultiheadAttention, nn.RNNBase)
"""Layers with dropout of their own, which has no mask."""


class MCDropout(SamplerCallback):
    """Turns each sample of the schedule into S samples with the same weights and different dropout masks.

        p(y|x,D) ≈ S⁻¹·Σ_s p(y|x, θ⊙m_s),   m_s the masks of all dropout layers

    With `DeepEnsemble()` as the schedule, a single chain gives MC dropout, and several an ensemble of it. A mask is
    drawn for each sample, not for each datum, so a sample is a network: its predictions do not depend on the batches or
    their order, and are the same in a new process. For each datum the average over masks has the law of MC dropout.

    A sample's file has the weights and, as the buffer `dropout_seed`, the seed of its masks, a function of (run's seed,
    chain, step, draw). `Posterior.predict`, `BayesianModelAverage` and reports apply the masks. The first axis of a
    layer's input is the batch's. The energy of the samples is that of the step.

    Args:
        num_draws: S, masks for each state.

    Raises:
        ValueError: if num_draws is below 1; at setup, if the network has no dropout layer (`nn.Dropout`, `nn.Dropout1d`
            to `nn.Dropout3d`) with p > 0, or has an `nn.AlphaDropout`, or no schedule would draw a sample.

    Source: Gal & Ghahramani 2016, "Dropout as a Bayesian Approximation", eq. (6).

    Example::

        trainer = pl.Trainer(max_epochs=50, callbacks=[DeepEnsemble(), MCDropout(num_draws=30)])
    """

    place = Place.CHAIN
    setting = "mc_dropout"

    def __init__(self, num_draws: int = 30) -> None:
        check_count("num_draws", num_draws, optional=False)
        self.num_draws = num_draws
        self.kind = "MC dropout"
        self._seed = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        module = bayesian(pl_module, self)
        several = layout_of(trainer, module.num_chains).total_chains > 1
        self.kind = "MC dropout ensemble" if several else "MC dropout"
        if stage != "fit":
            return
        require_schedule(trainer, self)
        _check_layers(module)
        module.chains.claims.claim("expand samples", self, self._expand)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chains = bayesian(pl_module, self).chains
        chains.tags.draws = self.num_draws
        self._seed = chains.seed or 0

    def _expand(self, sample: PosteriorSample) -> Iterator[PosteriorSample]:
        for draw in range(self.num_draws):
            seed = derive_seed(self._seed, "MCDropout", sample.chain, sample.step, draw)
            yield replace(sample, buffers=sample.buffers | {MASK_SEED: torch.tensor(seed)}, draw=draw)


def _check_layers(module: BayesianModule) -> None:
    """Raise unless the network has masks to draw; warn about dropout that has none."""
    name = type(module).__name__
    layers = list(module.named_modules())
    alpha = next((n for n, layer in layers if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)), None)
    if alpha is not None:
        raise ValueError(f"MCDropout has no mask for '{alpha}' of {name}, an AlphaDropout: use nn.Dropout")
    if not dropout_layers(module):
        raise ValueError(
            f"MCDropout needs dropout, and {name} has no nn.Dropout layer with p > 0, so its draws would all be "
            "equal: add nn.Dropout layers to the network, or remove MCDropout"
        )
    inner = [n for n, layer in layers if isinstance(layer, WITHOUT_MASK) and layer.dropout > 0]
    if inner:
        rank_zero_warn(
            f"MCDropout has no mask for the dropout inside '{inner[0]}', so it is off in predictions: only nn.Dropout "
            "layers have masks."
        )
