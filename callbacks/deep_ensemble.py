"""Deep ensembles: each chain is trained by optimization, and its last state is one member."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_sgmcmc.callbacks.planned_length import PlannedLength
from lightning_sgmcmc.callbacks.schedule import FirstStage, RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.warm_start import ChainOptimizers, check_optimizer, chosen_decay, make_optimizer
from lightning_sgmcmc.checks import check_choice, check_within
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.schedules import cyclical_lr_factor


class DeepEnsemble(Schedule):
    """Trains every chain by optimization, at temperature 0, and takes its last state as one member of the ensemble.

        lr_k = lr_0/2·[cos(π·(k-1)/K) + 1]·min(1, k/W),   K the run's optimizer steps, W = ⌈warm_up·K⌉

    `BayesianModule(num_chains=M)` has M members, each with its own start, data order and dropout, bit for bit the
    network that its chain would be alone. At temperature 0 `SGHMC` is SGD with momentum, `SGLD` is SGD and `pSGLD`
    is RMSprop; the prior is the weight decay. One chain is a single network. The members are written as samples, but
    they are not samples of the posterior.

    Args:
        lr_decay: "cosine" as above; "constant" keeps lr_0 after the warm-up, or without one leaves it to a scheduler of
            torch.
        optimizer: a class of `torch.optim`, or a partial of one, whose `step` needs no closure. It trains every chain
            at the module's lr, one number; None is the module's sampler at temperature 0. Its weight decay is 0, since
            the prior is in the loss, unless a partial sets one (AdamW's is decoupled), which needs `FlatPrior()`.
        warm_up: share of the run in which lr rises linearly, in [0, 1).

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the run has no end, its members would be
            equal because they share both their start and their batches, or the optimizer has several step sizes, a
            weight decay beside a prior, or a `WarmStart` before it.
        TypeError: for an optimizer that is none, or that needs a closure.

    Source: Lakshminarayanan et al. 2017, Algorithm 1 (without adversarial training).

    Example::

        trainer = pl.Trainer(max_epochs=50, callbacks=[DeepEnsemble()])
    """

    temperature = 0.0

    def __init__(
        self,
        lr_decay: Literal["cosine", "constant"] = "cosine",
        optimizer: Callable[..., Optimizer] | None = None,
        warm_up: float = 0.0,
    ) -> None:
        check_choice("lr_decay", lr_decay, ("cosine", "constant"))
        check_within("warm_up", warm_up, "[0, 1)")
        if optimizer is not None:
            check_optimizer(optimizer, "BayesianModule(lr=…)", decays=True)
        self.lr_decay = lr_decay
        self.optimizer = optimizer
        self.warm_up = warm_up
        self.kind = "deep ensemble"
        self._length = PlannedLength("DeepEnsemble")
        self._total = 0
        self._module: BayesianModule | None = None
        self._optimizers: ChainOptimizers | None = None
        self._saved: list[Any] | None = None
        """Optimizers' states of all chains, of a checkpoint or a fit that has ended."""

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self.lr_decay == "cosine" or self.warm_up > 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        members = layout_of(trainer, chains_of(pl_module).num_chains).total_chains
        self.kind = "deep ensemble" if members > 1 else "single network"

    def reset(self) -> None:
        super().reset()
        self._length.reset()
        self._saved = None

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
        if self.optimizer is not None:
            self._begin_optimizers(trainer, module)

    def _begin_optimizers(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        """Let torch's optimizers make the steps instead of the sampler."""
        assert self.optimizer is not None
        name, sampler, decay = name_of(self.optimizer), module.sampler, chosen_decay(self.optimizer)
        lr = sampler.param_groups[0]["initial_lr"]
        if len(sampler.param_groups) > 1 or not isinstance(lr, int | float):
            raise ValueError(f"DeepEnsemble(optimizer={name}) needs one step size, got lr={module.lr}: pass one number")
        if decay and not isinstance(module.prior, FlatPrior):
            raise ValueError(
                f"weight_decay={decay:g} of DeepEnsemble's {name} would act beside prior={module.prior!r}, which is in "
                "the loss: pass prior=FlatPrior() to the module, or omit weight_decay"
            )
        first = next((c for c in callbacks_of(trainer) if isinstance(c, FirstStage)), None)
        if first is not None:
            raise ValueError(
                f"DeepEnsemble(optimizer={name}) optimizes the whole run, and {type(first).__name__} its beginning: "
                "remove one of the two"
            )
        parameters = [p for group in sampler.param_groups for p in group["params"]]
        self._module, factory = module, self.optimizer
        self._optimizers = ChainOptimizers(
            parameters, module.num_chains, lambda own: make_optimizer(factory, own, float(lr), decay)
        )
        if self._saved is not None:
            for chain, index in enumerate(module.chains.layout.chains):
                self._optimizers.load_state_dict(chain, self._saved[index])
        sampler.stand_in = self._update

    def _update(self) -> None:
        """Make the optimizers' step instead of the sampler's."""
        assert self._module is not None
        assert self._optimizers is not None
        group = self._module.sampler.param_groups[0]
        factor = float(group["lr"]) / float(group["initial_lr"]) if group["initial_lr"] else 1.0
        self._optimizers.step(range(self._module.num_chains), factor)

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
        if self.warm_up:
            factor *= min(1.0, step / math.ceil(self.warm_up * self._total))
        return StepControls(factor, 0.0, Stage.SAMPLING if step == self._total else Stage.EXPLORATION)

    def draws(self, step: int) -> bool:
        return step == self._total

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self._module is not None:
            if not self._module.chains.layout.is_spread:  # the state can be saved after the fit as well
                self._saved = self._states()
            self._module.sampler.stand_in = self._module = self._optimizers = None

    def _states(self) -> list[Any] | None:
        """Return the state of each chain's optimizer, for all chains of the run."""
        if self._module is None or self._optimizers is None:
            return self._saved
        own = [self._optimizers.state_dict(chain) for chain in range(self._module.num_chains)]
        return self._module.chains.layout.collect(own)

    def state_dict(self) -> dict[str, Any]:
        state, optimizers = super().state_dict() | self._length.state_dict(), self._states()
        return state if optimizers is None else state | {"optimizers": optimizers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._length.load_state_dict(state_dict)
        self._saved = state_dict.get("optimizers")  # version 0.1.0 has none
