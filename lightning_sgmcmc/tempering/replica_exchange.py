"""Replica exchange (parallel tempering): chains at several temperatures swap them with their neighbours.

A ladder has R slots, each with a temperature, a step size and one of R chains. From time to time chains in neighbouring
slots swap with a probability that leaves the product of the slots' densities exp(-U/τ_r) invariant. Temperatures and
step sizes move, parameters do not. The energy of a mini-batch is noisy, and a noisy difference in the exponent swaps
too often; the corrected rate removes that bias (Deng et al. 2020, reSGLD). The functions map tensors to tensors and do
not wait for the device; the callback is below them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.batches.rows import training_rows
from lightning_sgmcmc.chains.callback import Place, Run, SampledChains, StepClaimant
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.schedule import target_of
from lightning_sgmcmc.chains.trainer import is_logged, log_interval, log_scalars
from lightning_sgmcmc.checks import check_count, check_flag, check_number, check_within
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import as_rows, exact, exact_device, sent

Number: TypeAlias = "float | Tensor"


def log_swap_rate(
    colder_energy: Tensor,
    hotter_energy: Tensor,
    colder_temperature: Number,
    hotter_temperature: Number,
    variance: Number = 0.0,
    correction: float = 1.0,
) -> Tensor:
    """Return the log of a swap's rate; the rate capped at 1 is the swap's probability.

        δ·(Ũ_cold - Ũ_hot - δ·variance/correction),   δ = 1/τ_cold - 1/τ_hot

    `variance`, in nats², is half that of the Gaussian noise on the difference of the two energies; with a correction of
    1 the mean rate is then the rate without noise. The cap at 1 leaves a bias that grows with the noise, and a larger
    correction swaps more often, with some bias.

    Source: Deng et al. 2020 (Non-convex learning via replica exchange stochastic gradient MCMC), section 3.
    """
    coldness = 1 / colder_temperature - 1 / hotter_temperature
    return coldness * (colder_energy - hotter_energy - coldness * variance / correction)


def pair_noise_variance(log_likelihood: Tensor, num_data: int, num_seen: int, replacement: bool) -> Tensor:
    """Return half the noise variance of each difference of neighbouring slots' mini-batch energies, shape (L, R-1).

        σ̂² = ½·N²/m·(1 - m/N)·S²,   S² the sample variance of ℓ_{r,i} - ℓ_{r+1,i} over a batch's places i

    It is unbiased for batches that the chains share and for independent ones, where S² is the sum of both chains'
    variances. ℓ are the log likelihoods of each datum of each slot's batch, shape (L, R, n), n ≥ 2; m counts the data
    of a chain in the whole step; with replacement the factor (1 - m/N) goes (Cochran 1977, theorem 2.2).
    """
    spread = (log_likelihood[:, :-1] - log_likelihood[:, 1:]).var(-1)
    unseen = 1.0 if replacement else max(0.0, 1 - num_seen / num_data)
    return spread * (num_data**2 * unseen / (2 * num_seen))


def attempted_pairs(attempt: int, num_slots: int) -> Tensor:
    """Return which of R-1 slot pairs (0, 1), (1, 2), … try to swap in an attempt, from 0: even and odd ones alternate.

    >>> attempted_pairs(0, 5), attempted_pairs(1, 5)
    (tensor([ True, False,  True, False]), tensor([False,  True, False,  True]))
    """
    turns = min(2, num_slots - 1)
    return torch.arange(num_slots - 1) % turns == attempt % turns


def swapped(order: Tensor, accepted: Tensor) -> Tensor:
    """Return the chain in each slot (L, R) after swaps of slots r and r+1 where accepted, (L, R-1), no two adjacent."""
    none = torch.zeros_like(accepted[:, :1])
    upward, downward = torch.cat([accepted, none], 1), torch.cat([none, accepted], 1)
    kept = torch.where(downward, order.roll(1, 1), order)
    return torch.where(upward, order.roll(-1, 1), kept)


# -- callback ----------------------------------------------------------------------------------------------------------


FEWEST_BETWEEN = 4
"""Steps from one attempt to the next from which those between are made at once."""
ATTEMPTS_DRAWN = 64
"""Attempts whose uniform numbers are drawn and sent to the device at once; the numbers do not depend on it."""


class ReplicaExchange(StepClaimant):
    """Runs the chains at a ladder of temperatures, which neighbouring chains swap.

    A run with P chains has P/R ladders of R = len(temperatures) slots. At the start chain r of a ladder is in slot r;
    the first slot is the coldest. At every attempt, before the update, the even or the odd pairs of neighbouring
    slots, in turn, swap temperatures and step sizes with probability

        min{1, exp(δ·(Ũ_cold - Ũ_hot - δ·σ̂²/F))},   δ = 1/τ_cold - 1/τ_hot

    with σ̂² half the variance of the mini-batch noise of Ũ_cold - Ũ_hot (the variance of one energy, if the chains have
    batches of their own), which would otherwise cause too many swaps. Chains swap temperatures, not states, so
    processes exchange a few numbers per chain; momenta are rescaled to the new temperature. With `SGLD` it is reSGLD,
    with `SGHMC` reSGHMC; with `VarianceReducedEnergy` its variance-reduced form. The draws of the coldest slot are
    samples; a sample's `chain` is its slot. The run's schedule sets the coldest slot's temperature and
    step size; while that temperature is 0 there are no swaps.

    Every `trainer.log_every_n_steps` it logs `exchange/swap_rate_0_1` and so on, the share of attempts that
    succeeded since the last log, and `exchange/energy_std`, σ̂ (in nats) over the pairs.

    Args:
        temperatures: increasing temperatures of the slots, in units of the run's temperature.
        lrs: step sizes of the slots in units of the run's; None means 1 for all.
        every_n_steps: steps between attempts.
        noise_variance: σ², in nats²; None estimates it by stochastic approximation from the differences of both
            chains' log-likelihoods in a step (see `lightning_sgmcmc.tempering.pair_noise_variance`). Batches
            are taken to be drawn without replacement, unless the loader's sampler has `replacement=True`. With
            `ClusteredOrder` the estimate is too large.
        smoothing: γ in (0, 1] of σ̂² ← (1-γ)·σ̂² + γ·estimate, at each attempt.
        correction: F ≥ 1; more than 1 allows more swaps, at the cost of some bias.
        sampled_slots: number of coldest slots whose draws are samples. Above 1 the samples are of several
            temperatures, and averages mix them without weights.
        include_prior: whether the energy includes -log p(θ), as the potential does; the authors' code excludes it. The
            swaps are then not those of the target, and the law of the samples is only approximate.

    Raises:
        ValueError: for an argument out of range; at setup, if the number of chains is not a multiple of the ladder's,
            chains have their own temperatures or step sizes, or the run has a contour.

    Source: Deng et al. 2020 (Non-convex learning via replica exchange stochastic gradient MCMC), Algorithm 1; Deng et
    al. 2021 (variance reduction).
    """

    changes_chain = True
    place = Place.CHAIN
    setting = "replica_exchange"
    claims: ClassVar[Mapping[str, str | None]] = {
        "set controls": "_set_controls",
        "chain temperatures": None,
        "prepare samples": "_name_chains",
    }

    def __init__(
        self,
        temperatures: Sequence[float],
        lrs: Sequence[float] | None = None,
        every_n_steps: int = 1,
        noise_variance: float | None = None,
        smoothing: float = 0.3,
        correction: float = 1.0,
        sampled_slots: int = 1,
        include_prior: bool = True,
    ) -> None:
        check_count("every_n_steps", every_n_steps)
        check_count("sampled_slots", sampled_slots)
        for name, values in (("temperatures", temperatures), ("lrs", lrs or [1.0])):
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"{name} must be a list with one number for each slot, got {values!r}")
            for value in values:
                check_number(name, value)
        if len(temperatures) < 2 or list(temperatures) != sorted(set(temperatures)) or temperatures[0] <= 0:
            raise ValueError(f"temperatures must be two or more increasing positive numbers, got {temperatures}")
        if lrs is not None and (len(lrs) != len(temperatures) or min(lrs) <= 0):
            raise ValueError(f"lrs must be {len(temperatures)} positive numbers, one for each slot, got {lrs}")
        check_number("noise_variance", noise_variance)
        check_within("smoothing", smoothing, "(0, 1]")
        check_within("correction", correction, "[1, inf)")
        check_flag("include_prior", include_prior)
        if sampled_slots > len(temperatures):
            raise ValueError(f"sampled_slots must be at most the {len(temperatures)} slots, got {sampled_slots}")
        self.temperatures = tuple(float(value) for value in temperatures)
        self.lrs = tuple(float(value) for value in lrs) if lrs is not None else (1.0,) * len(temperatures)
        self.every_n_steps = every_n_steps
        self.noise_variance = noise_variance
        self.smoothing = smoothing
        self.correction = correction
        self.sampled_slots = sampled_slots
        self.include_prior = include_prior
        self.reset()

    def reset(self) -> None:
        self._order = torch.empty(0, len(self.temperatures), dtype=torch.int64)
        """Global index of the chain in each slot, shape (ladders, R)."""
        self._attempts = 0
        self._variance: Tensor | None = None
        """σ̂² of each pair of slots, shape (ladders, R-1)."""
        self._replacement = False
        self._chances: tuple[int, Tensor] | None = None
        """The numbers of a block of attempts, and the block."""
        self._tried: list[Tensor] = []
        """The pairs of even and of odd attempts."""
        self._tally = torch.empty(0)
        """Attempts and swaps of each pair since the last log, shape (2, R-1)."""
        self._base: list[tuple[Control, Control]] = []
        self._hook: Any = None

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        chains, slots = layout_of(trainer, module.num_chains).total_chains, len(self.temperatures)
        if chains % slots:
            raise ValueError(
                f"ReplicaExchange has a ladder of {slots} temperatures, but the run has {chains} chains: pass "
                f"num_chains={slots}, or a multiple of it"
            )
        for name in ("temperature", "lr"):
            if isinstance(getattr(module, name), tuple | list):
                raise ValueError(
                    f"ReplicaExchange sets each chain's {name} by its slot: pass one {name} to the module, and the "
                    f"ladder's in {name}s"
                )
        if target_of(trainer, module) == 0:
            raise ValueError("ReplicaExchange needs a temperature above 0: at 0 all slots are the same")
        sampled = self.temperatures[: self.sampled_slots]
        if sampled != (1.0,):
            rank_zero_warn(
                f"ReplicaExchange draws samples at {', '.join(f'{value:g}' for value in sampled)} times the run's "
                "temperature, and averages mix them without weights: pass temperatures that begin with 1.0 and "
                "sampled_slots=1 to sample the run's own density."
            )
        if not self.include_prior:
            rank_zero_info("ReplicaExchange swaps by energies without the prior, so its samples are only approximate")

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        device, slots, chains = exact_device(run.module.device), len(self.temperatures), run.layout.total_chains
        self._slots = {
            "temperature": torch.tensor(self.temperatures, device=device),
            "lr": torch.tensor(self.lrs, device=device),
        }
        self._order = torch.arange(chains, device=device).view(-1, slots)
        self._tried = [attempted_pairs(attempt, slots).to(device) for attempt in range(2)]
        self._tally = torch.zeros(2, slots - 1, device=device)
        if saved is not None:
            self._attempts = saved["attempts"]
            self._order = saved["order"].to(device)
            self._tally = saved["tally"].to(device)
            self._variance = None if saved["variance"] is None else saved["variance"].to(device)
            if self._order.shape != (chains // slots, slots):
                raise ValueError("the checkpoint has another ladder of temperatures: resume with the same one")
        run.chains.observed.keeps_each = self.noise_variance is None
        self._replacement = training_rows(run.trainer).replacement
        # Schedules continue from the run's own controls, so the slots' controls apply only during an update.
        self._hook = run.sampler.register_step_post_hook(self._restore_controls)

    def sampled_chains(self, total: int) -> SampledChains:
        return SampledChains(total * self.sampled_slots // len(self.temperatures), self.lrs[0], self.temperatures[0])

    def plan_note(self) -> str:
        return "The plan is for the coldest slot of the ladder, without swaps."

    # -- a step -------------------------------------------------------------------------------------------------------

    def acts_in(self, step: int) -> bool:
        acting = self.every_n_steps, log_interval(self.run.trainer)
        return self.every_n_steps < FEWEST_BETWEEN or any([step % every == 0 for every in acting])

    def step_controls(self, group: Mapping[str, Any]) -> Mapping[str, Control]:
        return self._controls(group, self._own_slots()) if self._is_hot(group["temperature"]) else {}

    def _set_controls(self, trainer: pl.Trainer) -> None:
        """Attempt swaps, and set each chain's temperature and step size to its slot's for this update."""
        sampler = self.run.sampler
        temperature = sampler.param_groups[0]["temperature"]
        if not self._is_hot(temperature):
            return
        before = after = self._own_slots()
        if (sampler.step_count + 1) % self.every_n_steps == 0:
            self._exchange(temperature)
            after = self._own_slots()
        self._base = [(group["lr"], group["temperature"]) for group in sampler.param_groups]
        for group in sampler.param_groups:
            old, new = self._controls(group, before), self._controls(group, after)
            if before is not after:
                self._rescale_momenta(group, old, new)
            group.update(new)

    def _is_hot(self, temperature: Control) -> bool:
        """Return whether the slots differ: at a temperature of 0 there are no swaps."""
        return isinstance(temperature, Tensor) or temperature > 0

    def _own_slots(self) -> Tensor:
        """Return the slot of each of this process's chains, shape (C,)."""
        slots = torch.arange(self._order.shape[1], device=self._order.device).expand_as(self._order)
        of_chain = torch.empty_like(slots.flatten()).scatter_(0, self._order.flatten(), slots.flatten())
        return self.run.chains.layout.own(of_chain)

    def _controls(self, group: Mapping[str, Any], slots: Tensor) -> dict[str, Control]:
        device = self.run.module.device
        return {name: group[name] * sent(self._slots[name][slots], device) for name in ("lr", "temperature")}

    def _exchange(self, temperature: Control) -> None:
        """Swap chains between neighbouring slots; all processes draw the same numbers, without synchronization."""
        layout, observed = self.run.chains.layout, self.run.chains.observed
        energy = layout.mean_over_data(observed.corrected(self.include_prior))
        energies = layout.gather(energy)[self._order]
        variance = self._known_variance()
        chances = self._log_uniforms(len(energies), energies.shape[1], energies.device)
        tried = self._tried[self._attempts % len(self._tried)]
        if isinstance(temperature, Tensor):
            temperature = sent(temperature, energies.device)
        slots = temperature * self._slots["temperature"]
        log_rate = log_swap_rate(
            energies[:, :-1], energies[:, 1:], slots[:-1], slots[1:], variance, correction=self.correction
        )
        accepted = tried & (chances < log_rate)
        self._order = swapped(self._order, accepted)
        self._tally += torch.stack([tried.float() * len(energies), accepted.float().sum(0)])
        self._attempts += 1

    def _log_uniforms(self, ladders: int, slots: int, device: torch.device) -> Tensor:
        """Return logarithms of uniform numbers for this attempt, functions of (seed, attempt), shape (ladders, R-1)."""
        block, place = divmod(self._attempts, ATTEMPTS_DRAWN)
        if self._chances is None or self._chances[0] != block:
            rows = []
            for attempt in range(block * ATTEMPTS_DRAWN, (block + 1) * ATTEMPTS_DRAWN):
                generator = torch.Generator().manual_seed(derive_seed(self.run.sampler.seed, "exchange", attempt))
                rows.append(torch.rand(ladders, slots - 1, generator=generator))
            self._chances = (block, sent(torch.stack(rows).log(), device))
        return self._chances[1][place]

    def _known_variance(self) -> Tensor | float:
        """Return σ̂² for the pairs of slots, shape (ladders, R-1), or the given number."""
        if self.noise_variance is not None:
            return self.noise_variance
        module, observed = self.run.module, self.run.chains.observed
        each = observed.log_likelihood
        assert each is not None
        each = as_rows(exact(each), module.num_chains)
        if each.shape[1] < 2:
            raise ValueError(
                "the variance of an energy is estimated from the data of a mini-batch, which has a single datum "
                "here: pass noise_variance, or use larger batches"
            )
        if observed.reference_log_likelihood is not None:
            each = each - observed.reference_log_likelihood.to(each.device)
        layout = module.chains.layout
        seen = each.shape[1] * module.chains.accumulation.window * layout.ranks_per_chain
        of_slots = layout.gather(each)[self._order]
        found = layout.mean_over_data(pair_noise_variance(of_slots, observed.num_data, seen, self._replacement))
        self._variance = found if self._variance is None else self._variance.lerp(found, self.smoothing)
        return self._variance

    def _rescale_momenta(self, group: dict[str, Any], old: dict[str, Control], new: dict[str, Control]) -> None:
        laws = [self.run.sampler.law(dict(group) | controls) for controls in (old, new)]
        variances = [None if law is None else law.momentum_variance() for law in laws]
        if variances[0] is None or variances[1] is None:
            return
        self.run.sampler.rescale_momenta(group, torch.as_tensor(variances[1] / variances[0]).sqrt())

    def _restore_controls(self, *args: Any) -> None:
        """Restore the run's own controls in the parameter groups, after an update."""
        for group, (lr, temperature) in zip(self.run.sampler.param_groups, self._base, strict=False):
            group["lr"], group["temperature"] = lr, temperature
        self._base = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_logged(trainer, self.run.chains, self.run.sampler.step_count):
            return
        tried, accepted = self._tally.tolist()
        pairs = enumerate(zip(tried, accepted, strict=True))
        scalars = {f"exchange/swap_rate_{r}_{r + 1}": swaps / of for r, (of, swaps) in pairs if of}
        if self._variance is not None:
            scalars["exchange/energy_std"] = self._variance.mean().sqrt().item()
        if scalars:
            log_scalars(trainer, scalars, trainer.global_step)
        self._tally.zero_()

    # -- samples, the end, checkpoints --------------------------------------------------------------------------------

    def _name_chains(self) -> None:
        """Label each chain with its slot, when samples are drawn."""
        slots = self._order.shape[1]
        labels = [0] * self._order.numel()
        for ladder, row in enumerate(self._order.tolist()):
            for slot, chain in enumerate(row):
                labels[chain] = ladder * slots + slot
        tags = self.run.chains.tags
        tags.labels = labels
        tags.sampled = {label for label in labels if label % slots < self.sampled_slots}

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._chances = None

    def state(self) -> dict[str, Any]:
        return {
            "attempts": self._attempts,
            "order": self._order.cpu(),
            "tally": self._tally.cpu(),
            "variance": None if self._variance is None else self._variance.cpu(),
        }
