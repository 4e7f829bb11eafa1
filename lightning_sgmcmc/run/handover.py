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

    samples = 0
    """How many samples this run has drawn, over all chains of this process; a resumed run counts on."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.samples = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = cast("BayesianModule", pl_module)
        state = module.chain_state
        if not state.sample_due:
            return
        state.sample_due = False
        for sample in module.posterior_samples():
            self.samples += 1
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                hook = getattr(callback, "on_posterior_sample", None)
                if hook is not None:
                    hook(trainer, module, sample)
            module.on_posterior_sample(sample)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]
