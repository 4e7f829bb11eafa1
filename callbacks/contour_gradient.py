"""Contour sampling under a trainer: CSGLD, CSGHMC and the like, from any sampler."""

import math
from dataclasses import asdict
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.callbacks.schedule import run_length, schedule_of
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.checks import check_choice, check_count, check_number
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.contour.rules import (
    Contour,
    ContourState,
    DecayingStepSize,
    Difference,
    Location,
    Scheme,
    Weighting,
)
from lightning_sgmcmc.contour.warm_up import EnergyRecord
from lightning_sgmcmc.contour.watch import ContourWatch
from lightning_sgmcmc.evaluation.full_data import full_log_likelihood, undisturbed
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.loggers import log_scalars
from lightning_sgmcmc.samplers import Sampler


class ContourGradient(SamplerCallback):
    """Flattens the target in its energy, so that the chain crosses barriers, and weighs the samples accordingly.

        κ = 1 + ζ·τ·(log π(J) - log π((J-1)∨1))/Δu

    multiplies the fresh gradient of each step, with J the bin of the mini-batch's energy Ũ; π, a probability for each
    energy bin, is learned after the step; a sample's importance weight is Ψ(Ũ)^ζ (see `lightning_sgmcmc.contour`).
    With `SGLD` it is CSGLD, with `SGHMC` CSGHMC, with `pSGLD` pCSGLD; with a schedule that anneals step size and
    temperature saCSGHMC. Of several chains each learns a π of its own; with `interacting=True` all chains of the run
    learn one together, by the mean of their steps (ICSGLD, ICSGHMC, pICSGLD), and all that they tell each other is a
    whole number each: the energy's bin and its place in it. While the temperature is 0 (a cyclical schedule's
    exploration) it rests.

    The energy is that of the batch whose gradient is taken, over all micro-batches and ranks. `module.contour` holds
    the learned π, and with it weights by the final π instead of the one at the time of the sample.
    Every `trainer.log_every_n_steps` it logs `contour/multiplier`, `contour/bin`, `contour/step_size`, and
    `contour/clamped`, the share of clamped steps, where κ has limits.

    Args:
        zeta: ζ ≥ 0, how much is flattened: a barrier of energy B becomes one of about (1-ζ)·B with "original".
        num_bins: m, the number of energy bins.
        first_edge: u_1 in nats, upper end of the lowest bin, above the lowest energies that the chain reaches; None
            learns it from the warm-up.
        width: Δu in nats; None learns it from the warm-up, where first_edge is learned too.
        step_size: ω_k of the stochastic approximation.
        scheme: how π is learned: "scalable" (for networks), "original" or "high-order".
        difference: "backward" or "forward" difference in κ.
        weighting: "interpolated" weighs by Ψ(Ũ)^ζ, "bin" by π(J)^ζ, for bins that are wide against the temperature.
        warm_up_steps: optimizer steps from the start of the run without contour; a range to be learned is that of the
            energies in its second half. No sample may be drawn in it.
        lowest: share of the warm-up's energies below a learned first edge.
        headroom: how far the bins reach above the warm-up's largest energy, in units of its range.
        include_prior: whether the energy holds -log p(θ), as the potential does; the authors' programs leave it out.
        sample_energy: "step" gives a sample the energy of the step that led to it, which costs nothing; "full" its own
            over all training data, one more pass over them for each sample, without augmentation and in evaluation
            mode.
        min_multiplier: lower limit of κ; None is none.
        max_multiplier: upper limit of κ; None is none.
        flat_last_bin: no multiplier above the last edge, as in the first bin; False is eq. (6) to the letter.
        weight_exponent: α of tempered weights Ψ^{αζ}, in [0, 1]; 1 is exact.
        floor: lower limit of π(i); 0 is none.
        correction: ρ of the scheme "high-order".
        interacting: one π for all chains of the run, learned by all.
        exchange_every: interacting chains exchange their numbers every so many steps, and learn from all of them then.

    Raises:
        ValueError: for an argument out of range or a contradiction; at the start of the fit, for a temperature of 0
            throughout or a warm-up that does not end; at a sample that is due in the warm-up.

    Source: Deng et al. 2020 (CSGLD), Algorithm 1, eq. (6), (8), (10), (15), (57), appendix D.1; Deng et al. 2022
    (ICSGLD), Algorithm 1, eq. (8), appendix B.1.2.

    Example::

        trainer = pl.Trainer(
            max_epochs=200,
            callbacks=[
                SamplingSchedule(burn_in_epochs=100, every_n_epochs=1),
                ContourGradient(zeta=0.75, num_bins=100, warm_up_steps=2000),
            ],
        )
    """

    def __init__(
        self,
        zeta: float,
        num_bins: int = 100,
        first_edge: float | None = None,
        width: float | None = None,
        step_size: DecayingStepSize | None = None,
        scheme: Scheme = "scalable",
        difference: Difference = "backward",
        weighting: Weighting = "interpolated",
        warm_up_steps: int = 0,
        lowest: float = 0.05,
        headroom: float = 1.0,
        include_prior: bool = True,
        sample_energy: Literal["step", "full"] = "step",
        min_multiplier: float | None = None,
        max_multiplier: float | None = None,
        flat_last_bin: bool = True,
        weight_exponent: float = 1.0,
        floor: float = 0.0,
        correction: float = 1.0,
        interacting: bool = False,
        exchange_every: int = 1,
    ) -> None:
        check_count("exchange_every", exchange_every)
        if exchange_every > 1 and not interacting:
            raise ValueError(
                f"exchange_every={exchange_every} is of interacting chains: pass interacting=True too, or leave it out"
            )
        check_count("warm_up_steps", warm_up_steps, least=0)
        check_number("headroom", headroom)
        check_choice("sample_energy", sample_energy, ("step", "full"))
        if not 0 < lowest < 1:
            raise ValueError(f"lowest must be in (0, 1), got {lowest}")
        if first_edge is not None and width is None:
            raise ValueError(f"first_edge={first_edge} needs a width: give both, or leave both to the warm-up")
        if first_edge is None and warm_up_steps < 2:
            raise ValueError(
                f"the energy range is not known: give first_edge and width, or a warm-up to learn it from "
                f"(warm_up_steps of some hundred, got {warm_up_steps})"
            )
        self.zeta = zeta
        self.num_bins = num_bins
        self.first_edge = first_edge
        self.width = width
        self.step_size = step_size if step_size is not None else DecayingStepSize()
        self.warm_up_steps = warm_up_steps
        self.lowest = lowest
        self.headroom = headroom
        self.include_prior = include_prior
        self.sample_energy = sample_energy
        self.interacting = interacting
        self.exchange_every = exchange_every
        self._rule_options: dict[str, Any] = {
            "zeta": zeta,
            "scheme": scheme,
            "difference": difference,
            "weighting": weighting,
            "correction": correction,
            "flat_last_bin": flat_last_bin,
            "min_multiplier": min_multiplier,
            "max_multiplier": max_multiplier,
            "weight_exponent": weight_exponent,
            "floor": floor,
        }
        # Speaks up now about what is out of range.
        self._rules(EnergyPartition(first_edge or 0.0, width if width is not None else 1.0, num_bins))
        self.reset()

    def _rules(self, partition: EnergyPartition) -> Contour:
        return Contour(partition, **self._rule_options)

    def reset(self) -> None:
        self._updates = self._begun = 0
        self._record: EnergyRecord | None = None
        self._learned: LearnedContour | None = None
        self._restored: dict[str, Any] | None = None
        self._location: Location | None = None
        self._location_step = -1
        self._is_on = False
        self._watch = ContourWatch()
        self._clamped: Tensor | None = None
        self._clamped_of = 0
        self._waiting: list[Tensor] = []
        """What interacting chains have not told each other yet: energies as whole numbers, (C,) for each step."""

    # -- the start ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        schedule = schedule_of(trainer)
        own = getattr(schedule, "temperature", None)
        if (own if own is not None else bayesian(pl_module, self).temperature) == 0:
            raise ValueError(
                "ContourGradient flattens a target, and at temperature 0 there is none: set a temperature above 0, or "
                "leave the callback out"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = self._module = bayesian(pl_module, self)
        self._trainer = trainer
        self._sampler: Sampler = module.sampler
        self._state = module.chain_state
        self._interval = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self._on_host = module.device.type == "cpu" and module.num_chains == 1
        warm_up = 0 if trainer.fast_dev_run else self.warm_up_steps  # type: ignore[attr-defined]
        # A checkpoint of a run without this callback may be the start.
        self._begun = self._sampler.step_count if self._restored is None else int(self._restored["begun"])
        self._warm_up = self._begun + warm_up
        if run_length(trainer) <= self._warm_up:
            raise ValueError(
                f"the run has {run_length(trainer):.0f} steps, and the contour is warming up for {self._warm_up} of "
                "them: shorten warm_up_steps or lengthen the run"
            )
        if self.sample_energy == "full" and _differs_in_training(module):
            rank_zero_warn(
                "sample_energy='full' takes energies in evaluation mode, and this network's differ from those of its "
                "training mode (dropout or BatchNorm), by which π is learned: take sample_energy='step'."
            )
        self._state.before_sample = self._before_sample
        self._learned = None
        self._is_on = True  # a checkpoint's multiplier may be in force
        if self.first_edge is not None and self.width is not None:
            self._begin(EnergyPartition(self.first_edge, self.width, self.num_bins))
        elif warm_up:
            self._record = EnergyRecord(warm_up, module.num_chains, module.device)
        if self._restored is not None:
            self._resume(self._restored)
        if self._learned is not None:
            self._say_regularisation(self._learned.rules)

    def _begin(self, partition: EnergyPartition, state: ContourState | None = None) -> None:
        """Start the contour with an energy partition."""
        device = self._module.device
        rules = self._rules(partition)
        own = self._module.num_chains > 1 and not self.interacting
        initial = rules.initial_state(self._module.num_chains if own else None, device)
        self._learned = LearnedContour(rules, state or initial)
        self._publish()
        self._edges = partition.edges(device)

    def _publish(self) -> None:
        """Let the module hold what is learned, of all chains of the run."""
        assert self._learned is not None
        self._module.contour = LearnedContour(self._learned.rules, ContourState(**self._of_all_chains()))

    def _of_all_chains(self) -> dict[str, Tensor]:
        """Return what is learned by name: one vector (m,), or one for each chain of the run (P, m)."""
        assert self._learned is not None
        layout, state = self._module.layout, self._learned.state._asdict()
        if self.interacting or not layout.is_spread:
            return state
        return {name: layout.gather_stored(tensor) for name, tensor in state.items()}

    def _of_own_chains(self, whole: dict[str, Tensor]) -> ContourState:
        """Return this process's part of what `_of_all_chains` returned, as tensors of its own."""
        layout = self._module.layout
        if not self.interacting and layout.is_spread:
            whole = {name: layout.own_stored(tensor) for name, tensor in whole.items()}
        return ContourState(**{name: t.to(self._module.device, copy=True) for name, t in whole.items()})

    @staticmethod
    def _say_regularisation(rules: Contour) -> None:
        active = {
            name: value
            for name in ("min_multiplier", "max_multiplier", "weight_exponent", "floor")
            if (value := getattr(rules, name)) != getattr(Contour, name)
        }
        if active:
            settings = ", ".join(f"{name}={value}" for name, value in active.items())
            rank_zero_info(f"ContourGradient is regularised ({settings}), so its weights are not exact")

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        sampler, step = self._sampler, self._sampler.step_count
        self._location = None
        temperature = sampler.param_groups[0]["temperature"]
        if not (isinstance(temperature, Tensor) or temperature > 0):
            self._rest()
            return
        if step < self._warm_up:
            if self._record is not None:
                self._record.take(step + 1 - self._begun, self._energy())
            return
        if self._learned is None and not self._learn_range():
            return
        assert self._learned is not None
        try:
            location = self._learned.rules.locate(self._learned.state, self._energy(), temperature, self._edges)
        except ValueError:  # a NaN: the guard has more to say, and there will be no step
            return
        self._location, self._location_step, self._is_on = location, step, True
        # On the host a number is as good as a tensor, and cheaper.
        sampler.set_control("gradient_multiplier", location.multiplier.item() if self._on_host else location.multiplier)

    def _energy(self) -> Tensor:
        """Return the energy of the step's data, shape (C,), float64, over all ranks."""
        return self._module.layout.mean_over_data(self._state.observed_energy(self.include_prior))

    def _rest(self) -> None:
        if self._is_on:
            self._sampler.set_control("gradient_multiplier", 1.0)
            self._is_on = False

    def _learn_range(self) -> bool:
        """Make the partition from the warm-up's energies; return whether there are any."""
        if self._record is None:
            return False
        energies, self._record = self._module.layout.gather(self._record.energies, dim=1), None
        if not bool(energies.isfinite().any()):
            raise ValueError(
                f"the second half of the {self._warm_up} steps of the warm-up was at temperature 0, where the contour "
                "rests, so the energy range is not known: lengthen warm_up_steps into the first sampling stage, or "
                "give first_edge and width"
            )
        partition = EnergyPartition.from_energies(
            energies[energies.isfinite()], self.num_bins, self.width, self.lowest, self.headroom
        )
        rank_zero_info(
            f"ContourGradient learned its energy range: first_edge={partition.first_edge:.6g}, "
            f"width={partition.width:.6g}, last edge {partition.last_edge:.6g}"
        )
        self._begin(partition)
        self._say_regularisation(self._rules(partition))
        return True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        location = self._location
        if location is None or self._sampler.step_count != self._location_step + 1:
            return  # micro-batches that only accumulate, and steps that were left out
        assert self._learned is not None
        self._location = None
        self._updates += 1
        rules, step_size = self._learned.rules, self.step_size.at(self._updates)
        if self.interacting:
            self._learn_together(location)
        else:
            rules.learn_(self._learned.state, location.index, location.log_density, step_size)
        self._state.log_weight, self._state.bin = rules.log_weight(location.log_density), location.index
        self._count_clamped(rules, location)
        if self._sampler.step_count % self._interval == 0:
            self._log(trainer, location, step_size)
        self._watch.after_update(self._learned, self._updates)

    def _learn_together(self, location: Location) -> None:
        """Exchange the chains' energies as whole numbers, when it is time, and learn from all of them."""
        assert self._learned is not None
        rules, state = self._learned.rules, self._learned.state
        self._waiting.append(rules.partition.encode(location.energy, location.index))
        if len(self._waiting) < self.exchange_every:
            return
        codes = self._module.layout.gather(torch.stack(self._waiting), dim=1)
        first = self._updates - len(self._waiting) + 1
        self._waiting = []
        for update, of_step in enumerate(codes, start=first):
            everyone = rules.locate(state, rules.partition.decode(of_step), 1.0, self._edges)
            rules.learn_(state, everyone.index, everyone.log_density, self.step_size.at(update))

    def _count_clamped(self, rules: Contour, location: Location) -> None:
        if rules.min_multiplier is None and rules.max_multiplier is None:
            return
        low = -math.inf if rules.min_multiplier is None else rules.min_multiplier
        high = math.inf if rules.max_multiplier is None else rules.max_multiplier
        clamped = (location.multiplier <= low) | (location.multiplier >= high)
        self._clamped = clamped.double() if self._clamped is None else self._clamped + clamped
        self._clamped_of += 1

    def _log(self, trainer: pl.Trainer, location: Location, step_size: float) -> None:
        both = torch.stack([location.multiplier, location.index.double()])
        multiplier, index = self._module.layout.gather(both, dim=1).mean(1).tolist()
        scalars = {"contour/multiplier": multiplier, "contour/bin": index, "contour/step_size": step_size}
        if self._clamped is not None:
            scalars["contour/clamped"] = self._clamped.mean().item() / self._clamped_of
            self._clamped, self._clamped_of = None, 0
        log_scalars(trainer, scalars, trainer.global_step)

    # -- a sample -----------------------------------------------------------------------------------------------------

    def _before_sample(self) -> None:
        """Bring energy, bin and weight of the present states up to date."""
        if self._learned is None or self._state.bin is None:
            if self._trainer.fast_dev_run:  # type: ignore[attr-defined]
                return
            raise ValueError(
                f"a sample is due after step {self._sampler.step_count}, and it has no weight: the contour has not "
                f"begun. Let the schedule draw its first sample after the {self._warm_up} steps of the warm-up"
            )
        self._publish()
        if self.sample_energy == "step":
            self._state.sample_energy = self._energy()
            return
        learned, energy = self._learned, self._full_energy()
        location = learned.rules.locate(learned.state, energy, 1.0, self._edges)
        self._state.sample_energy, self._state.bin = energy, location.index
        self._state.log_weight = learned.rules.log_weight(location.log_density)

    def _full_energy(self) -> Tensor:
        """Return U of each chain's present state, shape (C,), over all training data."""
        module = self._module
        energies = []
        for chain in range(module.num_chains):
            with module.at_chain(chain), torch.no_grad():
                state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                log_prior = float(module.log_prior()) if self.include_prior else 0.0
            with undisturbed(self._trainer, module):
                chains, reason = module.chains, "sample_energy='full'"
                found = full_log_likelihood(self._trainer, chains, state, reason, of_own_chain=True)
            energies.append(-found - log_prior)
        return torch.tensor(energies, dtype=torch.float64, device=module.device)

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self._watch.after_sample(sample.log_weight)

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._learned is not None:
            self._watch.finish(self._learned, self._updates)
            self._publish()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        """Let go of the run, so that module and callback can be copied and pickled."""
        if self.__dict__.pop("_trainer", None) is not None:
            self._state.before_sample = self._state.sample_energy = None

    def state_dict(self) -> dict[str, Any]:
        learned = self._learned
        return {
            "updates": self._updates,
            "begun": self._begun,
            "rules": None if learned is None else asdict(learned.rules),
            "state": None if learned is None else {k: v.cpu() for k, v in self._of_all_chains().items()},
            "record": None if self._record is None else self._record.state_dict(self._module.layout),
            "waiting": self._module.layout.gather(torch.stack(self._waiting), 1).cpu() if self._waiting else None,
            "watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def _resume(self, restored: dict[str, Any]) -> None:
        self._restored = None
        self._updates = restored["updates"]
        self._watch.load_state_dict(restored["watch"])
        if restored["record"] is not None and self._record is not None:
            self._record.load_state_dict(restored["record"], self._module.layout)
        if restored["rules"] is None:
            return
        partition = EnergyPartition(**restored["rules"]["partition"])
        known = self._learned.rules.partition if self._learned is not None else partition
        rules = self._rules(known if partition.num_bins == self.num_bins else EnergyPartition(0, 1, self.num_bins))
        for name, value in asdict(rules).items():
            if value != restored["rules"][name]:
                raise ValueError(
                    f"the checkpoint's contour has {name}={restored['rules'][name]}, this run's has {name}={value}: go "
                    "on with the same settings, or start a new run"
                )
        self._record = None
        vectors, chains = restored["state"]["log_vector"], self._module.layout.total_chains
        expected = (self.num_bins,) if self.interacting or chains == 1 else (chains, self.num_bins)
        if vectors.shape != expected:
            raise ValueError(
                f"the checkpoint's π has the shape {tuple(vectors.shape)}, this run's {expected}: go on with as many "
                "chains, interacting or not as they were"
            )
        self._begin(partition, self._of_own_chains(restored["state"]))
        if restored["waiting"] is not None:
            self._waiting = list(self._module.layout.own(restored["waiting"], 1).to(self._module.device))


def _differs_in_training(module: BayesianModule) -> bool:
    """Return whether a network's outputs differ between training and evaluation mode."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    return any(isinstance(layer, kinds) for layer in module.modules())
