"""Where a run's contour comes from: its arguments, a range learned in a warm-up, or a choice from its energies."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.contour.auto import LEAST_ENERGIES, ContourChoice, ContourGoals, choose_contour
from lightning_sgmcmc.contour.contour import Contour, ContourRules, ContourState
from lightning_sgmcmc.contour.partition import EnergyPartition, EnergyRange
from lightning_sgmcmc.tensors import exact


class ContourStart:
    """Makes the contour of a run, at its first step or at the end of its warm-up.

    Args:
        rules: the rules; None lets the warm-up's energies choose them, with the bins.
        energy_range: the bins, as far as they are given.
        include_prior: whether the energy includes -log p(θ), unless that is chosen.
        goals: what to choose settings for; None chooses none.
    """

    def __init__(
        self, rules: ContourRules | None, energy_range: EnergyRange, include_prior: bool, goals: ContourGoals | None
    ) -> None:
        if goals is not None:
            default = EnergyRange(100)
            given = {"rules": rules is not None, "include_prior": not include_prior}
            for name in ("num_bins", "first_edge", "width", "lowest", "headroom"):
                given[name] = getattr(energy_range, name) != getattr(default, name)
            chosen = [name for name, is_given in given.items() if is_given]
            if chosen:
                raise ValueError(f"auto chooses {chosen[0]} from the warm-up's energies: omit it, or pass auto=False")
        elif rules is None:
            raise ValueError("rules=None: pass ContourRules(zeta=…), or auto=True to choose them in the warm-up")
        self.rules = rules
        self.range = energy_range
        self.goals = goals
        self._include_prior = include_prior
        if rules is not None:  # checks the rules against num_bins
            Contour(energy_range.given or EnergyPartition(0.0, 1.0, energy_range.num_bins), rules)
        self.reset()

    def reset(self, chains: ChainLayout | None = None, device: torch.device | None = None) -> None:
        """Forget an earlier run; the chains and the device of the coming one's energies are known when it begins."""
        self._chains, self._device = chains or ChainLayout(), device
        self.choice: ContourChoice | None = None
        self.begin: int | None = None
        """Steps of the sampler before the warm-up; None if it follows the run's first stage."""
        self.length: int | None = None
        """Steps of the warm-up, None while that is open."""
        self._record: EnergyRecord | None = None

    @property
    def include_prior(self) -> bool:
        """Whether the contour's energy includes -log p(θ)."""
        return self._include_prior if self.choice is None else self.choice.include_prior

    def first_step(self, begin: int) -> int:
        """Return the steps of the sampler before the contour begins, by those before a warm-up that follows the run's
        first stage."""
        return (begin if self.begin is None else self.begin) + (self.length or 0)

    def open(self, length: int, begin: int | None = None) -> None:
        """Begin a warm-up of some steps, 0 for none; `begin` is None if it follows the run's first stage."""
        self.begin, self.length = begin, length
        if length and self.range.given is None:
            self._record = EnergyRecord(length, self._chains, self._device, keeps_prior=self.goals is not None)

    def open_until(self, step: int, first_sample: int | None) -> None:
        """Begin a warm-up after a step that ends half-way to the run's first sample, None if that is unknown."""
        length = 0 if first_sample is None else (first_sample - step) // 2
        if (length - length // 2) * self._chains.total_chains < LEAST_ENERGIES:
            due = "no first sample is planned"
            if first_sample is not None:
                due = f"the first sample is due after step {first_sample}"
            raise ValueError(
                f"auto=True chooses from the energies of a warm-up, and after step {step} there is none that is long "
                f"enough: {due}. Lengthen the schedule's burn-in, or pass warm_up_steps"
            )
        self.open(length, begin=step)

    @property
    def is_recording(self) -> bool:
        """Whether the warm-up's energies are needed."""
        return self._record is not None

    def record(self, number: int, energies: Tensor, log_priors: Tensor) -> None:
        """Record the energies of the warm-up's steps from a number 1, 2, … on, shape (K, C), and log p(θ)."""
        if self._record is not None:
            self._record.add(number, energies, log_priors)

    def decide(self, temperature: float) -> tuple[Contour, ContourState | None, str] | None:
        """Return the contour, its initial π and a sentence on what was learned; None if there was no warm-up."""
        record, self._record = self._record, None
        if record is None:
            return None
        if self.rules is None:
            energies, log_priors = record.everything()
            self.choice = choice = choose_contour(energies, temperature, self.goals, log_priors)
            used = energies if choice.include_prior or log_priors is None else energies + log_priors
            return choice.contour, choice.initial_state(used[~used.isnan()]), choice.sentence
        partition = self.range.learned(record.energies())
        edges = f"first_edge={partition.first_edge:.6g}, last edge {partition.last_edge:.6g}"
        return Contour(partition, self.rules), None, f"learned its energy range: {edges}, width={partition.width:.6g}"

    def given(self) -> Contour | None:
        """Return the contour of the arguments, None if the warm-up is to make it."""
        partition = self.range.given
        return None if partition is None or self.rules is None else Contour(partition, self.rules)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, names and tensors."""
        return {
            "record": None if self._record is None else self._record.state_dict(),
            "warm_up": None if self.length is None else (self.begin, self.length),
            "choice": None if self.choice is None else self.choice.as_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Contour | None:
        """Restore from `state_dict()` and the learner's "rules"; return the contour if the warm-up was over."""
        choice = state["choice"]
        self.choice = None if choice is None else ContourChoice.from_json(choice)
        if self.goals is not None:
            if state["warm_up"] is not None:
                begin, length = state["warm_up"]
                self.open(length, begin)
            if state["rules"] is not None and (self.choice is None or self.choice.goals != self.goals):
                there = "were given" if self.choice is None else f"were chosen for {self.choice.goals}"
                raise ValueError(
                    f"the settings of the checkpoint's contour {there}, this run's are to be chosen for {self.goals}: "
                    "continue with the same arguments, or start a new run"
                )
        if state["rules"] is not None:
            self._record = None
            if self.rules is None:
                return None if self.choice is None else self.choice.contour
            self.choice = None
            return Contour(self.range.resumed(state["rules"]["partition"]), self.rules)
        if state["record"] is not None and self._record is not None:
            self._record.load_state_dict(state["record"])
        return None


class EnergyRecord:
    """Records the energies of a warm-up's second half, without the way from the start, and waits for no device."""

    def __init__(
        self, steps: int, chains: ChainLayout, device: torch.device | None = None, keeps_prior: bool = False
    ) -> None:
        self._chains = chains
        self._first = steps // 2
        shape = (steps - self._first, chains.num_chains)
        self._energies = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self._log_priors = self._energies.clone() if keeps_prior else None

    def add(self, step: int, energies: Tensor, log_priors: Tensor) -> None:
        """Record the energies of steps from a number 1, 2, … on, shape (K, C), and log p(θ), of shape (K, C) or
        (K, 1)."""
        left_out = max(0, self._first + 1 - step)
        start, count = step + left_out - self._first - 1, len(energies) - left_out
        if count > 0:
            self._energies[start : start + count].copy_(energies[left_out:])
            if self._log_priors is not None:
                self._log_priors[start : start + count].copy_(exact(log_priors[left_out:]))

    def everything(self) -> tuple[Tensor, Tensor | None]:
        """Return energies and log p(θ) of all chains of the run, shape (S, P), NaN where none was recorded."""
        priors = self._log_priors
        return self._chains.gather(self._energies, 1), None if priors is None else self._chains.gather(priors, 1)

    def energies(self) -> Tensor:
        """Return the recorded energies of all chains of the run, shape (S,)."""
        energies = self._chains.gather(self._energies, 1)
        found = energies[energies.isfinite()]
        if found.numel() == 0:
            raise ValueError(
                f"the second half of the warm-up, {len(self._energies)} steps, was at temperature 0, where the contour "
                "rests, so the energy range is not known: lengthen warm_up_steps into the first sampling stage, or "
                "pass first_edge and width"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all chains of the run."""
        energies, priors = self.everything()
        return {"energies": energies.cpu()} | ({} if priors is None else {"log_priors": priors.cpu()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, of a warm-up with the same length and number of chains."""
        expected = (len(self._energies), self._chains.total_chains)
        if state["energies"].shape != expected:
            raise ValueError(
                f"the checkpoint is of another warm-up: it has {len(state['energies'])} energies of "
                f"{state['energies'].shape[1]} chains, this run {expected[0]} of {expected[1]}. Continue with the same "
                "warm_up_steps and num_chains, or start a new run"
            )
        self._energies.copy_(self._chains.own(state["energies"], 1))
        if self._log_priors is not None:
            self._log_priors.copy_(self._chains.own(state["log_priors"], 1))


class EnergiesOfSteps:
    """The work of a warm-up in compiled steps (`StepPart`): it takes note of their energies, and changes nothing.

    Args:
        end: is called with Ũ/N and log p(θ) of some steps, shape (K, 2, C).
    """

    settings = "energies"
    scales, keeps_each = False, True

    def __init__(self, end: Callable[[Tensor], None]) -> None:
        self._ended = end
        self.state: Sequence[Tensor] = []
        self.fixed: Sequence[Tensor] = []

    def numbers(self, steps: int) -> Tensor:
        """Return no numbers that matter, shape (K,)."""
        return torch.zeros(steps)

    def multiplier(self, *given: Any) -> tuple[None, None]:
        """Return nothing: the gradient stays as it is."""
        return None, None

    def learn(self, state: Sequence[Tensor], found: None, number: Tensor) -> list[Tensor]:
        """Return the state, which is empty."""
        return []

    def end(self, steps: int, energies: Tensor) -> None:
        """Take note of the energies of some steps."""
        self._ended(energies)
