"""Deep ensembles: each chain is trained by optimization, and its last state is one member."""

from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.callbacks.planned_length import PlannedLength
from lightning_sgmcmc.callbacks.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.schedules import cyclical_lr_factor


class DeepEnsemble(Schedule):
    """Trains every chain by optimization, at temperature 0, and takes its last state as one member of the ensemble.

        lr_k = lr_0/2·[cos(π·(k-1)/K) + 1],   K the run's optimizer steps

    `BayesianModule(num_chains=M)` has M members, each with its own start, data order and dropout, bit for bit the
    network that its chain would be alone. At temperature 0 `SGHMC` is SGD with momentum, `SGLD` is SGD and `pSGLD`
    is RMSprop; the prior is the weight decay. One chain is a single network. The members are written as samples, but
    they are not samples of the posterior.

    Args:
        lr_decay: "cosine" as above; "constant" keeps lr_0, or leaves it to a scheduler of torch.

    Raises:
        ValueError: for another lr_decay; at the start of the fit, if the run has no end, or its members would be equal
            because they share both their start and their batches.

    Source: Lakshminarayanan et al. 2017, Algorithm 1 (without adversarial training).

    Example::

        trainer = pl.Trainer(max_epochs=50, callbacks=[DeepEnsemble()])
    """

    temperature = 0.0

    def __init__(self, lr_decay: Literal["cosine", "constant"] = "cosine") -> None:
        check_choice("lr_decay", lr_decay, ("cosine", "constant"))
        self.lr_decay = lr_decay
        self.kind = "deep ensemble"
        self._length = PlannedLength("DeepEnsemble")
        self._total = 0

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self.lr_decay == "cosine"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        members = layout_of(trainer, chains_of(pl_module).num_chains).total_chains
        self.kind = "deep ensemble" if members > 1 else "single network"

    def reset(self) -> None:
        super().reset()
        self._length.reset()

    def lay_out(self, length: RunLength) -> None:
        self._total = self._length.steps_of(length)

    def plan(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        chains = module.chains
        members = chains.layout.total_chains
        if members > 1 and chains.start == "same" and chains.shared_batch:
            raise ValueError(
                f"the {members} members of this DeepEnsemble would be equal, because chain_start='same' and "
                "shared_batch=True give them one start and one data order: omit one of the two"
            )
        super().plan(trainer, module)
        self._length.begin(trainer)

    def announce_optimization(self, module: BayesianModule) -> None:
        members = module.chains.layout.total_chains
        if members > 1:
            rank_zero_info(f"DeepEnsemble trains {members} networks by optimization (temperature 0).")
        else:
            rank_zero_info(
                "DeepEnsemble has one chain, so it trains a single network by optimization (temperature 0): pass "
                "num_chains=… to BayesianModule for an ensemble."
            )

    @property
    def first_sample(self) -> int:
        return self._total

    def controls(self, step: int) -> StepControls:
        factor = cyclical_lr_factor(step, self._total) if self.lr_decay == "cosine" else 1.0
        return StepControls(factor, 0.0, Stage.SAMPLING if step == self._total else Stage.EXPLORATION)

    def draws(self, step: int) -> bool:
        return step == self._total

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._length.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._length.load_state_dict(state_dict)
