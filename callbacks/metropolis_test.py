"""The Metropolis test that makes the law of GGMC and AMAGOLD exact."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.rows import fault_of_order, fault_of_start, has_short_steps
from lightning_sgmcmc.chains.callback import ChainSizes, Place, Run, SamplerCallback, refuse_loss_scaler
from lightning_sgmcmc.chains.chains import ChainModel, Chains
from lightning_sgmcmc.chains.schedule import Schedule, epoch_length, is_optimization, require_schedule, schedule_of
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import fit_steps, instances_of, is_probe, is_trial, log_interval, log_scalars
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.evaluation.loader_average import HeldData, held_data
from lightning_sgmcmc.evaluation.passes import differs_in_training, full_energies
from lightning_sgmcmc.health.verdict import SELDOM_ACCEPTED
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.samplers.reversible import ReversibleLangevin, Trajectory
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import exact_device

GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler

FOREIGN = {
    "set controls": "changes the sampled law, and the test is of exp(-U/τ)",
    "choose gradient": "chooses a step's batch by the state, so a trajectory is not the same backwards",
    "snapshot gradients": "uses gradients of a snapshot, which a trajectory backwards would not have",
    "expand samples": "replaces the tested states by draws of its own",
}
"""Subjects of callbacks with which a test cannot be combined, and why."""

MOST_STEPS = 1_000_000
"""Steps of a run for which the schedule is compared with the trajectories."""


class MetropolisTest(SamplerCallback):
    """Accepts or rejects trajectories of `GGMC` or `AMAGOLD`, so that the samples have the law exp(-U/τ) exactly.

        a = exp((U(θ_0) - U(θ_K) + W)/τ)

    is the acceptance probability of a trajectory of K steps from θ_0 to θ_K (where it is below 1), with U of all
    training data in evaluation mode, and W the work of the forces that the steps have taken (see the samplers). Each
    chain has its own test. A rejected chain returns to θ_0 with its momentum reversed. So samples are drawn after tests
    only: a schedule that draws, or changes the step size or the temperature, within a trajectory raises an error. Steps
    at temperature 0 are not tested. The random numbers depend on (seed, chain, step).

    Each test costs a pass over all training data without gradients; with trajectories of an epoch a third more time.

    The gradients may be those of mini-batches, of any size, clipped or with dropout: what the test corrects is the law.
    But they must be as likely in the opposite order, so trajectories are whole epochs in random order, parts of one, or
    independent batches. Mini-batch noise of covariance C in ∇Ũ lowers the mean log a by K·h²·tr C/(2τ) for independent
    batches, and by less for whole epochs. tr C grows with the number of weights, so for networks acceptance needs a
    small h, large batches or full gradients. There the unadjusted law is good too: the test certifies it.

    At a test, unless `trainer.log_every_n_steps` steps have not passed since the last log, it logs
    `metropolis/acceptance_rate`, the mean of min(1, a) over the tests since then and over all chains, and
    `metropolis/log_acceptance`, the mean of log a. `acceptance_rate` has the rate of each chain in the sampling stage.

    Args:
        every_n_steps: K, optimizer steps of a trajectory; None takes those of an epoch.

    Raises:
        ValueError: for an argument out of range; at setup, without a schedule before this callback, or for a loss
            scaler; at the start of the fit, for another sampler, temperature 0, a `HierarchicalPrior`, a scheduler of
            torch, batches in a fixed order, trajectories that cut epochs or the schedule's stages and draws, or a
            callback that changes the sampled law or the gradients (`ContourGradient`, `ReplicaExchange`, `EWSG`,
            `ControlVariates`, `CovarianceFriction`, `SWAG`, `MCDropout`).

    Source: Zhang, Cooper & De Sa 2020 (AMAGOLD), Algorithm 2; Garriga-Alonso & Fortuin 2021 (GGMC).

    Example::

        module = BayesianModule(net=torch.nn.Linear(2, 1), likelihood=Gaussian(std=0.1), sampler=AMAGOLD, lr=0.002)
        callbacks = [SamplingSchedule(burn_in_epochs=100, every_n_epochs=5), MetropolisTest(), SampleCollector()]
        trainer = pl.Trainer(max_epochs=1000, callbacks=callbacks)  # trainer.fit(module, data)
    """

    changes_chain = True
    tests_trajectories = True
    place = Place.CHAIN
    setting = "metropolis_test"

    def __init__(self, every_n_steps: int | None = None) -> None:
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.reset()

    def reset(self) -> None:
        self._steps = 0
        self._step = 0
        """Number of the coming or last step in the schedule, from 1; 0 before it."""
        self._trajectory: Trajectory | None = None
        self._energy: tuple[int, Tensor] | None = None
        """N, and U of the chains' states at the last test, shape (C,)."""
        self._held: HeldData | None = None
        """The training data that these are of."""
        self._sums = torch.zeros(0)
        """Of the tests since the last log, of each chain: min(1, a) and log a, shape (C, 2)."""
        self._tests = 0
        self._total = torch.zeros(0)
        """Sum of min(1, a) in the sampling stage, shape (C,)."""
        self._sampling_tests = 0

    @property
    def acceptance_rate(self) -> Tensor | None:
        """Mean of min(1, a) of each chain of this process in the sampling stage, shape (C,); None before a test."""
        return self._total.cpu() / self._sampling_tests if self._sampling_tests else None

    # -- checks -------------------------------------------------------------------------------------------------------

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        require_schedule(trainer, self)
        refuse_loss_scaler(trainer, "MetropolisTest adds up the work of the gradients")

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        trainer, module, sampler, schedule = run.trainer, run.module, run.sampler, schedule_of(run.trainer)
        assert schedule is not None
        if not isinstance(sampler, ReversibleLangevin):
            raise ValueError(
                f"MetropolisTest needs a sampler with trajectories, and {type(sampler).__name__} has none: use "
                "sampler=AMAGOLD or sampler=GGMC"
            )
        self._steps = self.every_n_steps or epoch_length(trainer)
        check_run(trainer, module, self._steps)
        if not is_trial(trainer):
            check_trajectories(trainer, module, sampler, schedule, self._steps)
        warn_of_other_laws(trainer, module)
        self._trajectory = Trajectory(sampler)
        zeros = torch.zeros(module.num_chains, 2, dtype=torch.float64, device=exact_device(module.device))
        self._sums, self._total = zeros, zeros[:, 0].clone()
        if saved is not None:
            self._continue(saved, run.chains, module.device)
            self._held = held_data(trainer)  # data that change during a run are part of the checkpoint

    def memory(self, sizes: ChainSizes) -> int:
        return 2 * sizes.parameters  # a trajectory's start, with its momenta

    def plan_note(self) -> str:
        return "The plan is as if MetropolisTest accepted all trajectories; its energies are no gradients."

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        trajectory, sampler, chains = self._trajectory, self.run.sampler, self.run.chains
        assert trajectory is not None
        self._step = sampler.step_count + 1 - chains.progress.warm_steps
        position = (self._step - 1) % self._steps
        begins = position == 0 and self._step > 0 and batch_idx % trainer.accumulate_grad_batches == 0
        if begins and not trajectory.is_on and sampler.is_noisy(sampler.param_groups[0]):
            fault = fault_of_start(trainer, self._steps, batch_idx)
            if fault is not None:
                raise ValueError(f"{fault} with MetropolisTest: let the warm start end with (an even number of) epochs")
            trajectory.begin(self._present_energy(trainer, chains))
        if trajectory.is_on:
            trajectory.set_place(position, self._steps)

    def _present_energy(self, trainer: pl.Trainer, chains: Chains) -> Tensor:
        """Return U of the chains' states, shape (C,): that of the last test, unless the data have changed."""
        before, self._held = self._held, held_data(trainer)
        is_known = self._energy is not None and self._energy[0] == chains.observed.num_data
        if is_known and before is not None and before.is_same(self._held):
            assert self._energy is not None
            return self._energy[1]
        return full_energies(trainer, chains, True, "MetropolisTest")

    def _check_data(self, trainer: pl.Trainer) -> None:
        """Raise if the training data have changed within the trajectory, whose energies are of different ones then."""
        if self._held is not None and not self._held.is_same(held_data(trainer)):
            raise ValueError(
                "the training data changed within a trajectory of MetropolisTest: append data in on_train_epoch_start, "
                "or in on_train_batch_end of a callback that comes after MetropolisTest, with trajectories that end "
                "there"
            )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        trajectory, chains = self._trajectory, self.run.chains
        assert trajectory is not None
        if not trajectory.is_on or self._step % self._steps:
            return
        schedule = schedule_of(trainer)
        if schedule is None or not schedule.has_stepped(pl_module):
            return
        self._check_data(trainer)
        found = trajectory.end(full_energies(trainer, chains, True, "MetropolisTest"), self._log_uniforms(chains))
        self._energy = chains.observed.num_data, trajectory.energy
        self._count(found, chains.progress.stage is Stage.SAMPLING)
        self._log(trainer, chains)

    def _log_uniforms(self, chains: Chains) -> Tensor:
        """Return the logarithm of a uniform number for each chain, functions of (seed, chain, step), shape (C,)."""
        sampler, drawn = self.run.sampler, []
        for chain in chains.layout.chains:
            seed = derive_seed(sampler.seed, "metropolis", chain, sampler.step_count)
            drawn.append(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        return torch.stack(drawn).log().to(exact_device(chains.model.device))

    def _count(self, log_acceptance: Tensor, is_sampling: bool) -> None:
        probability = log_acceptance.clamp(max=0.0).exp().nan_to_num(nan=0.0)
        self._sums += torch.stack([probability, log_acceptance], 1)
        self._tests += 1
        if is_sampling:
            self._total += probability
            self._sampling_tests += 1

    def _log(self, trainer: pl.Trainer, chains: Chains) -> None:
        if self._tests * self._steps < log_interval(trainer):
            return
        rate, log_acceptance = chains.layout.gather(self._sums / self._tests).mean(0).tolist()
        scalars = {"metropolis/acceptance_rate": rate, "metropolis/log_acceptance": log_acceptance}
        log_scalars(trainer, scalars, trainer.global_step)
        self._sums.zero_()
        self._tests = 0

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rates = self.acceptance_rate
        if rates is None or is_trial(trainer) or is_probe(trainer):
            return
        rates = self.run.layout.gather(rates)
        worst = int(rates.argmin())
        if rates[worst] < SELDOM_ACCEPTED:
            rank_zero_warn(
                f"MetropolisTest accepted {float(rates[worst]):.2g} of the trajectories of chain {worst}, which moved "
                "seldom: use a smaller lr, larger batches or fewer steps in a trajectory (every_n_steps), and a "
                "WarmStart, since a chain that starts far from the posterior is rejected too."
            )

    def end(self) -> None:
        """Leave the trajectory; the rates stay."""
        if self._trajectory is not None:
            self._trajectory.leave()
        self._total, self._sums = self._total.cpu(), torch.zeros(0)
        self._trajectory = self._energy = self._held = None

    def state(self) -> dict[str, Any]:
        """Return the counts of the tests, and of an unfinished trajectory its start, of all chains of the run."""
        trajectory = self._trajectory
        state: dict[str, Any] = {"tests": self._tests, "sampling_tests": self._sampling_tests}
        if trajectory is None:
            return state
        layout, sampler = self.run.layout, self.run.sampler
        assert isinstance(sampler, ReversibleLangevin)
        state |= {"sums": layout.gather(self._sums.cpu()), "total": layout.gather(self._total.cpu())}
        if self._energy is not None:
            state["energy"] = (self._energy[0], layout.gather(self._energy[1].cpu()))
        if sampler.work is not None:
            state["work"] = layout.gather(sampler.work.cpu())
            state["start_energy"] = layout.gather(trajectory.energy.cpu())
            state["start"] = [layout.gather_stored(tensor.cpu()) for tensor in trajectory.tensors()]
        return state

    def _continue(self, saved: dict[str, Any], chains: Chains, device: torch.device) -> None:
        """Continue from a checkpoint, in the middle of a trajectory too."""
        layout = chains.layout

        def own(tensor: Tensor) -> Tensor:
            return layout.own(tensor).to(exact_device(device), copy=True)

        self._tests, self._sampling_tests = saved["tests"], saved["sampling_tests"]
        if "sums" in saved:
            self._sums, self._total = own(saved["sums"]), own(saved["total"])
        if "energy" in saved:
            self._energy = saved["energy"][0], own(saved["energy"][1])
        if "work" in saved:
            assert self._trajectory is not None
            start = [layout.own_stored(tensor).to(device, copy=True) for tensor in saved["start"]]
            self._trajectory.restore(start, own(saved["start_energy"]), own(saved["work"]))


# -- what makes the law exact ----------------------------------------------------------------------------------------


def check_run(trainer: pl.Trainer, module: ChainModel, steps: int) -> None:
    """Raise for a run whose law a test of trajectories cannot make exact."""
    if steps == 0:
        raise ValueError(
            "the training loader has no length, so a trajectory of an epoch has no known steps: pass every_n_steps"
        )
    if is_optimization(trainer, module):
        raise ValueError("MetropolisTest needs a temperature above 0: at 0 there is no law to be exact about")
    if isinstance(module.prior, HierarchicalPrior):
        raise ValueError(
            "HierarchicalPrior draws its scales between steps, so U changes within a trajectory: use GaussianPrior"
        )
    if trainer.lr_scheduler_configs:
        scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
        raise ValueError(f"{scheduler} changes the step size within trajectories of MetropolisTest: remove it")
    if instances_of(trainer, GradientAccumulationScheduler):
        raise ValueError(
            "GradientAccumulationScheduler changes the data of a step, so a trajectory is not the same backwards: set "
            "the trainer's accumulate_grad_batches instead"
        )
    for subject, reason in FOREIGN.items():
        holder = module.chains.claims.holder(subject)
        if holder is not None:
            name = type(holder).__name__
            raise ValueError(f"MetropolisTest and {name} cannot be combined: {name} {reason}; remove one of them")


def check_trajectories(
    trainer: pl.Trainer, module: ChainModel, sampler: ReversibleLangevin, schedule: Schedule, steps: int
) -> None:
    """Raise for trajectories that do not move, or that the batches or the schedule make unlike their reverse."""
    if steps < sampler.least_steps:
        raise ValueError(
            f"a trajectory of {steps} step does not move with {type(sampler).__name__}: pass every_n_steps of "
            f"at least {sampler.least_steps}, or use sampler=AMAGOLD"
        )
    length = fit_steps(trainer) - module.chains.progress.warm_steps
    fault = fault_of_order(trainer, steps) or fault_of_schedule(schedule, steps, length)
    if fault is not None:
        raise ValueError(f"the trajectories of MetropolisTest must be as likely backwards, but {fault}")


def warn_of_other_laws(trainer: pl.Trainer, module: ChainModel) -> None:
    """Warn of a network or of batches with which the tested law is another one, or not quite exact."""
    if is_probe(trainer):
        return
    if differs_in_training(module):
        rank_zero_warn(
            "MetropolisTest computes energies in evaluation mode, so with dropout the law is that of the network "
            "without it, and few trajectories are accepted; with BatchNorm, whose statistics change within a "
            "trajectory, the law is not exact: use other layers, or module.eval() for BatchNorm."
        )
    if has_short_steps(trainer):
        rank_zero_warn(
            "The last step of an epoch has fewer data than the others, so trajectories are not quite the same "
            "backwards, and the law of MetropolisTest is not quite exact: pass drop_last=True, or a batch_size "
            "that divides the data."
        )


def fault_of_schedule(schedule: Schedule, trajectory: int, steps: float) -> str | None:
    """Return why a schedule does not fit trajectories of so many steps, and the remedy; None if it does."""
    held: Any = None
    for step in range(1, int(min(steps, MOST_STEPS)) + 1):
        lr_factor, temperature, _, temperature_factor = schedule.controls(step)
        now = temperature if temperature == 0 else (lr_factor, temperature, temperature_factor)
        if step % trajectory == 1 or trajectory == 1:
            held = now
        elif now != held:
            return (
                f"{type(schedule).__name__} changes the step size or the temperature with step {step}, within a "
                f"trajectory of {trajectory} steps: keep them constant (SamplingSchedule), and let stages end with "
                "trajectories"
            )
        if step % trajectory and schedule.draws(step):
            return (
                f"{type(schedule).__name__} draws a sample at step {step}, within a trajectory of {trajectory} steps: "
                f"let draws be multiples of {trajectory} steps apart, after as many of burn-in, or pass every_n_steps"
            )
    return None
