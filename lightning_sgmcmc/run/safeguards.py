"""The one callback that `BayesianModule` adds to a run."""

from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl

from lightning_sgmcmc.chains.state import ChainState
from lightning_sgmcmc.run.checkpoints import protect_checkpoints
from lightning_sgmcmc.run.checks import check_data, check_run
from lightning_sgmcmc.run.guard import EnergyGuard
from lightning_sgmcmc.run.handover import SampleHandover
from lightning_sgmcmc.run.interruption import Interruption

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


class Safeguards(SampleHandover):
    """Hands samples over, and sees to it that nothing good is lost: it checks the run at its start, guards the energy,
    ends an interrupted run with a checkpoint, and lets checkpoints be complete or not there.

    One callback for all of them, since each costs some 5 µs a step.
    """

    def __init__(self) -> None:
        self._interruption = Interruption()
        self._guard: EnergyGuard | None = None
        self._skipped = 0
        self._state: ChainState | None = None
        self._gradient_evaluations = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        protect_checkpoints(trainer)
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._guard, self._skipped, self._gradient_evaluations = None, 0, 0
            check_run(trainer, cast("BayesianModule", pl_module))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = cast("BayesianModule", pl_module)
        check_data(trainer)
        module.begin_energies(trainer)
        self._guard = EnergyGuard(module, trainer, self._skipped)
        self._state = module.chain_state
        self._state.gradient_evaluations = self._gradient_evaluations
        module.__dict__["_guard"] = module.sampler.guard = self._guard
        self._interruption.begin(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._interruption.after_step(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interruption.end()
        if self._guard is not None:
            self._guard.finish()
        self._release(pl_module)

    def _release(self, pl_module: pl.LightningModule) -> None:
        """Let go of the trainer, so that the module can be copied and pickled."""
        module = cast("BayesianModule", pl_module)
        self._skipped, self._guard = module.skipped_steps, None
        self._gradient_evaluations, self._state = module.gradient_evaluations, None
        module.end_energies()
        module.__dict__["_guard"] = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._interruption.save(trainer, exception)
        self._interruption.end()
        self._release(pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._guard is not None and trainer.state.fn == "fit":
            self._guard.check_state("it is not saved")
        # What says no more than a part's name is for loggers; `load_from_checkpoint` would hand it to the constructor.
        hyperparameters = checkpoint.get(pl_module.CHECKPOINT_HYPER_PARAMS_KEY, {})
        for name in ("likelihood", "prior", "sampler"):
            if isinstance(hyperparameters.get(name), str):
                del hyperparameters[name]

    def state_dict(self) -> dict[str, Any]:
        skipped = self._guard.skipped if self._guard is not None else self._skipped
        evaluations = self._state.gradient_evaluations if self._state is not None else self._gradient_evaluations
        return super().state_dict() | {"skipped_steps": skipped, "gradient_evaluations": evaluations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._skipped = state_dict["skipped_steps"]
        self._gradient_evaluations = state_dict.get("gradient_evaluations", 0)
