"""The learning of π during a run, by chains that learn alone or together."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.contour.contour import Contour, ContourKernels, ContourState, DecayingStepSize, Location
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.tensors import exact


class ContourLearner:
    """Learns π from the energies of a run's steps: `locate` before an update, `learn` after it.

    Args:
        contour: partition and rules.
        step_size: ω_k of the stochastic approximation.
        chains: the chains that learn, this process's among those of the run.
        device: of the tensors; None is the host.
        interacting: one π for all chains of the run, learned by all; else each chain learns its own.
        exchange_every: number of updates between exchanges of interacting chains' energies.
        compiled: whether to compile the functions of a step.
        initial: π and visits with which every chain begins, shapes (m,); None is a uniform π.

    Source: Deng et al. 2020 (CSGLD), Algorithm 1; Deng et al. 2022 (ICSGLD), Algorithm 1.
    """

    def __init__(
        self,
        contour: Contour,
        step_size: DecayingStepSize,
        chains: ChainLayout,
        device: torch.device | None = None,
        interacting: bool = False,
        exchange_every: int = 1,
        compiled: bool = False,
        initial: ContourState | None = None,
    ) -> None:
        self.contour = contour
        self.step_size = step_size
        self.chains = chains
        self._device = torch.device("cpu") if device is None else device
        self.interacting = interacting
        self.exchange_every = exchange_every
        own = None if interacting or chains.num_chains == 1 else chains.num_chains
        state = contour.initial_state(own, self._device)
        if initial is not None:
            for tensor, begin in zip(state, initial, strict=True):
                tensor.copy_(begin)
        self.learned = LearnedContour(contour, state)
        """The contour with the π of this process's chains."""
        self.updates = 0
        """Steps that were learned from."""
        self._kernels = ContourKernels(contour, self._device, compiled)
        self._waiting: list[Tensor] = []
        """Encoded energies that interacting chains have not exchanged yet, shape (C,) for each step."""
        self._clamped: Tensor | None = None
        self._clamped_of = 0

    @property
    def is_shared(self) -> bool:
        """Whether all chains of the run have one π, so that their log-weights have the same constant."""
        return self.interacting or self.chains.total_chains == 1

    @property
    def is_limited(self) -> bool:
        """Whether the multipliers have limits."""
        return self.contour.rules.min_multiplier is not None or self.contour.rules.max_multiplier is not None

    @property
    def is_local(self) -> bool:
        """Whether a step's learning needs no other process, and no energies of earlier steps."""
        return not self.interacting or (self.exchange_every == 1 and not self.chains.is_spread)

    # -- a step -------------------------------------------------------------------------------------------------------

    def locate(self, energy: Tensor, temperature: float | Tensor = 1.0) -> Location:
        """Return bin, multiplier and log Ψ of the chains' energies (C,); a NaN in the host's memory raises."""
        return self._kernels.locate(self.learned.state, energy, temperature)

    def log_acceptance(self, location: Location, change: Tensor) -> Tensor:
        """Return ζ·(log Ψ(U) - log Ψ(U + change)), shape (C,): the log probability, if negative, of accepting a move
        that is right without the flattening."""
        return self.contour.rules.zeta * (location.log_density - self.locate(location.energy + change).log_density)

    def learn(self, location: Location) -> None:
        """Update π after a step from there."""
        self.updates += 1
        if self.interacting:
            self._learn_together(location)
        else:
            step_size = self.step_size.at(self.updates)
            self._kernels.learn(self.learned.state, location, step_size)
        self._count_clamped(location.multiplier)

    def _learn_together(self, location: Location) -> None:
        """Exchange the encoded energies when it is time, and learn from those of all chains."""
        if self.is_local:
            self._kernels.learn_together(self.learned.state, location, self.step_size.at(self.updates))
            return
        self._waiting.append(self._kernels.encode(location))
        if len(self._waiting) < self.exchange_every:
            return
        codes = self.chains.gather(torch.stack(self._waiting), 1)
        first = self.updates - len(self._waiting) + 1
        self._waiting = []
        for update, of_step in enumerate(codes, start=first):
            self._kernels.learn_coded(self.learned.state, of_step, self.step_size.at(update))

    def _count_clamped(self, multiplier: Tensor) -> None:
        rules = self.contour.rules
        if not self.is_limited:
            return
        low = -math.inf if rules.min_multiplier is None else rules.min_multiplier
        high = math.inf if rules.max_multiplier is None else rules.max_multiplier
        self.count_clamped(exact((multiplier <= low) | (multiplier >= high)), 1)

    def count_clamped(self, clamped: Tensor, steps: int) -> None:
        """Add how often each chain's multiplier was at a limit, shape (C,), float64, in some steps."""
        self._clamped = clamped if self._clamped is None else self._clamped + clamped
        self._clamped_of += steps

    def scalars(self, location: Location) -> dict[str, float]:
        """Return what is logged of a step by name: means over all chains of the run, ω, and if κ has limits, the share
        of this process's multipliers at a limit since the last call."""
        both = torch.stack([location.multiplier, exact(location.index)])
        multiplier, index = self.chains.gather(both, 1).mean(1).tolist()
        step_size = self.step_size.at(self.updates)
        scalars = {"contour/multiplier": multiplier, "contour/bin": index, "contour/step_size": step_size}
        if self._clamped is not None:
            scalars["contour/clamped"] = self._clamped.mean().item() / self._clamped_of
            self._clamped, self._clamped_of = None, 0
        return scalars

    # -- all chains of the run ----------------------------------------------------------------------------------------

    def of_all_chains(self) -> LearnedContour:
        """Return the contour with π of all chains of the run: one vector (m,), or one for each chain (P, m)."""
        state = self.learned.state
        if not self.interacting and self.chains.is_spread:
            state = ContourState(*map(self.chains.gather_stored, state))
        return LearnedContour(self.contour, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all chains of the run."""
        state = self.of_all_chains().state._asdict()
        return {
            "updates": self.updates,
            "rules": self.contour.to_dict(),
            "state": {name: tensor.cpu() for name, tensor in state.items()},
            "waiting": self.chains.gather(torch.stack(self._waiting), 1).cpu() if self._waiting else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, of the same settings and chains."""
        before, now = (_flat(settings) for settings in (state["rules"], self.contour.to_dict()))
        for name, value in now.items():
            if value != before[name]:
                raise ValueError(
                    f"the checkpoint's contour has {name}={before[name]}, this run's has {name}={value}: continue with "
                    "the same settings, or start a new run"
                )
        vectors, chains, bins = state["state"]["log_vector"], self.chains.total_chains, self.contour.partition.num_bins
        expected = (bins,) if self.interacting or chains == 1 else (chains, bins)
        if vectors.shape != expected:
            raise ValueError(
                f"the checkpoint's π has the shape {tuple(vectors.shape)}, this run's {expected}: continue with the "
                "same num_chains and interacting"
            )
        self.updates = state["updates"]
        tensors = [state["state"][name] for name in ContourState._fields]
        if not self.interacting and self.chains.is_spread:
            tensors = list(map(self.chains.own_stored, tensors))
        own = ContourState(*(tensor.to(self._device, copy=True) for tensor in tensors))
        self.learned = LearnedContour(self.contour, own)
        if state["waiting"] is not None:
            self._waiting = list(self.chains.own(state["waiting"], 1).to(self._device))


class LearningInSteps:
    """A learner's work in compiled steps (`StepPart`); its state is the learner's own, with the last step's location.

    Args:
        end: is called with the last step's location after steps in which the learner has learned.
    """

    scales, keeps_each = True, False

    def __init__(self, learner: ContourLearner, include_prior: bool, end: Callable[[Location], None]) -> None:
        contour, state = learner.contour, learner.learned.state
        self._learner, self._contour, self._include_prior, self._ended = learner, contour, include_prior, end
        partition = contour.partition
        self.settings = repr((contour.rules, partition.num_bins, learner.interacting, include_prior))
        numbers, device = state[0].new_zeros(len(Location._fields) + 1, learner.chains.num_chains), state[0].device
        self._location, self._clamped = numbers[1:].clone(), numbers[0].clone()
        self.state: Sequence[Tensor] = [*state, self._clamped, self._location]
        # The bins' range, which each run may learn, is not written into what is compiled.
        place = [exact(number).to(device) for number in (partition.first_edge, partition.width)]
        self.fixed: Sequence[Tensor] = [partition.edges(device), *place]

    def is_of(self, learner: ContourLearner) -> bool:
        """Return whether it is that learner's work."""
        return learner is self._learner

    def numbers(self, steps: int) -> Tensor:
        """Return ω of the coming steps, shape (K,)."""
        first = self._learner.updates + 1
        return exact([self._learner.step_size.at(first + ahead) for ahead in range(steps)])

    def multiplier(
        self, state: Sequence[Tensor], fixed: Sequence[Tensor], energies: Tensor, temperature: Tensor, num_data: Tensor
    ) -> tuple[Tensor, tuple[Location, Location]]:
        """Return κ, and the location of the chains' energies and that from which π is learned, from Ũ/N and log p(θ),
        shape (2, C)."""
        potential, log_prior = exact(energies)
        energy = potential * exact(num_data) + (0.0 if self._include_prior else log_prior)
        index = (energy[:, None] > fixed[0]).sum(-1)
        learned, contour = ContourState(*state[:2]), self._contour.at(*fixed[1:])
        location = contour.locate(learned, energy, exact(temperature), fixed[0], index)
        used = location
        if self._learner.interacting:
            energy = contour.partition.decode(contour.partition.encode(energy, index))
            used = contour.locate(learned, energy, 1.0, fixed[0], index)
        return location.multiplier, (location, used)

    def learn(self, state: Sequence[Tensor], found: tuple[Location, Location], number: Tensor) -> list[Tensor]:
        """Return the state after a step of ω from a location."""
        contour, rules, (location, used) = self._contour, self._contour.rules, found
        learned = ContourState(state[0].clone(), state[1].clone())
        contour.learn_densely_(learned, used.index, used.log_density, number)
        clamped = state[2].clone()
        for limit, side in ((rules.min_multiplier, torch.le), (rules.max_multiplier, torch.ge)):
            if limit is not None:
                clamped = clamped + side(location.multiplier, limit)
        return [*learned, clamped, torch.stack([exact(part) for part in location])]

    def end(self, steps: int, energies: Tensor) -> None:
        """Count steps in which the learner has learned."""
        self._learner.updates += steps
        if self._learner.is_limited:
            self._learner.count_clamped(self._clamped.clone(), steps)
        self._clamped.zero_()
        index, *others = self._location.clone()
        self._ended(Location(index.long(), *others))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `Contour.to_dict` with those of the partition beside the rules."""
    return settings["partition"] | {name: value for name, value in settings.items() if name != "partition"}
