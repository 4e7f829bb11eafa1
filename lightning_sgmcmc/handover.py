"""How samples reach the callbacks."""

from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


class SampleHandover(pl.Callback):
    """Hands the samples of a step to every callback with the hook `on_posterior_sample`, and to the module.

    It stands behind the user's callbacks, so that all have had their say about the step, and before the checkpoint
    callbacks, so that a checkpoint of this step knows of its samples.
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast("BayesianModule", pl_module)
        state = module.chain_state
        if not state.sample_due:
            return
        state.sample_due = False
        for sample in module.posterior_samples():
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                hook = getattr(callback, "on_posterior_sample", None)
                if hook is not None:
                    hook(trainer, module, sample)
            module.on_posterior_sample(sample)
