"""What a run has learned about its energies, to weigh samples after the run, and to watch how it learns."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.contour.auto import ContourChoice
from lightning_sgmcmc.contour.contour import Contour, ContourRules, ContourState
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.files import parse_json
from lightning_sgmcmc.health.verdict import DOMINANT_WEIGHT, FEW_SAMPLES, ContourUse
from lightning_sgmcmc.tensors import Control, exact


class LearnedContour:
    """A contour with its learned π; it weighs samples by their energies.

    Args:
        contour: partition and rules.
        state: the learned π and the visits.
    """

    def __init__(self, contour: Contour, state: ContourState) -> None:
        self.contour = contour
        self.state = state
        self.choice: ContourChoice | None = None
        """How its settings were chosen, if they were (`ContourGradient(auto=True)`)."""
        self.shares = WeightShares()
        """The weights of the run's samples so far."""
        self.temperature: Control = 1.0
        """τ of the run's last steps; a tensor is read by `use` only, since that waits for its device."""

    @property
    def partition(self) -> EnergyPartition:
        """The energy bins."""
        return self.contour.partition

    @property
    def rules(self) -> ContourRules:
        """The rules: ζ, scheme, limits and so on."""
        return self.contour.rules

    @property
    def is_shared(self) -> bool:
        """Whether there is one π, so that the weights of all chains have the same constant."""
        return self.state.log_vector.dim() == 1

    @property
    def masses(self) -> Tensor:
        """The target's estimated mass in each bin, shape (m,) or (C, m), float64."""
        return self.contour.log_masses(self.state).exp()

    def log_weights(self, energies: Tensor, chains: Tensor | None = None) -> Tensor:
        """Return log importance weights by the present π, up to a constant.

        Args:
            energies: of the samples, shape (S,), in nats.
            chains: index of each sample's chain, shape (S,); required if every chain has its own π.
        """
        device = energies.device  # after a fit on a GPU the state is still there
        state = ContourState(*(part.to(device) for part in self.state))
        if state.log_vector.dim() == 2:
            rows = torch.zeros(len(energies), dtype=torch.int64) if chains is None else chains
            state = ContourState(state.log_vector[rows.to(device)], state.visits[rows.to(device)])
        edges = self.partition.edges(device)
        return self.contour.log_weight(self.contour.locate(state, energies, 1.0, edges).log_density)

    def use(self) -> ContourUse:
        """Return what the contour did in the run, by the present π, the visits and the samples' weights."""
        vectors, visits = (part.reshape(-1, part.shape[-1]).cpu() for part in self.state)
        temperature = float(exact(torch.as_tensor(self.temperature)).mean()) or 1.0  # 0 in an exploration
        multipliers = torch.stack(
            [self.contour.multipliers(ContourState(*row), temperature) for row in zip(vectors, visits, strict=True)]
        )
        squares = (multipliers - 1).square() * visits
        return ContourUse(
            spread=float((squares.sum() / visits.sum().clamp_min(1)).sqrt()),
            steps=int(visits.sum()) // len(visits),
            samples=self.shares.count,
            efficiency=self.shares.efficiency,
            largest_share=self.shares.largest,
            promised=None if self.choice is None else self.choice.efficiency,
        )

    def as_json(self) -> dict[str, Any]:
        """Return as plain data its settings, what it did, and how they were chosen (None if they were given)."""
        choice = None if self.choice is None else self.choice.as_json()
        return {"settings": self.contour.to_dict(), "use": asdict(self.use()), "choice": choice}

    def to_bytes(self) -> bytes:
        """Return the content of a safetensors file for `from_bytes`."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state._asdict().items()}
        return save(tensors, {"rules": json.dumps(self.contour.to_dict())})

    @classmethod
    def from_bytes(cls, content: bytes) -> "LearnedContour":
        """Read what `to_bytes` returned.

        Raises:
            ValueError: if the content is damaged or not a learned contour.
        """
        try:
            length = int.from_bytes(content[:8], "little")
            settings = parse_json(parse_json(content[8 : 8 + length])["__metadata__"]["rules"])
            contour, state = Contour.from_dict(settings), ContourState(**load(content))
            shape, kinds = state.log_vector.shape, (state.log_vector.dtype, state.visits.dtype)
            if kinds != (torch.float64, torch.int64) or len(shape) not in (1, 2) or state.visits.shape != shape:
                raise ValueError(f"log_vector and visits have the shapes {shape} and {state.visits.shape}")
            if shape[-1] != contour.partition.num_bins or shape[0] == 0:
                raise ValueError(f"{contour.partition.num_bins} bins do not fit the shape {tuple(shape)}")
            return cls(contour, state)
        except (
            *(SafetensorError, ValueError, LookupError, TypeError),
            *(AttributeError, RecursionError, OverflowError, MemoryError),
        ) as error:
            raise ValueError(f"the content is damaged or not a learned contour: {error}") from error


class WeightShares:
    """Sums of importance weights and of their squares, in log space, for each chain whose weights have a constant."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums: dict[int | None, tuple[float, float, float]] = {}
        """By chain: the largest log-weight, the log of the sum of weights, and of their squares."""

    def add(self, log_weight: float, chain: int | None = None) -> None:
        """Add a sample."""
        self._samples += 1
        largest, total, squares = self._sums.get(chain, (-math.inf,) * 3)
        total, squares = np.logaddexp(total, log_weight), np.logaddexp(squares, 2 * log_weight)
        self._sums[chain] = max(largest, log_weight), float(total), float(squares)

    @property
    def count(self) -> int:
        """Samples of each chain, or of all together if their weights compare."""
        return self._samples // max(1, len(self._sums))

    @property
    def largest(self) -> float | None:
        """The share of the largest weight, the mean over chains; None without samples."""
        return self._mean([_ratio(big, total) for big, total, _ in self._sums.values()])

    @property
    def efficiency(self) -> float | None:
        """(Σw)²/(S·Σw²), the mean over chains; None without samples."""
        worth = [_ratio(2 * total, squares) for _, total, squares in self._sums.values()]
        return self._mean([one / max(1, self.count) for one in worth])

    def _mean(self, values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers."""
        return {"samples": self._samples, "sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._samples, self._sums = state["samples"], dict(state["sums"])


def _ratio(log_one: float, log_other: float) -> float:
    return 0.0 if log_other == -math.inf else math.exp(min(log_one - log_other, 700.0))


FIRST_CHECK = 500
"""Updates before the first check; each later one comes after twice as many, since a check waits for the device."""
END_BIN_SHARE = 0.99
"""Share of the energies in an end bin above which the partition is called wrong."""
STEEP = 30.0
"""ζ·|log π(J) - log π(J-1)| above which weights within one bin differ by more than e^30."""


class ContourWatch:
    """Checks the visited bins and the samples' weights, and warns once of each fault."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._emit = warn
        self._next = FIRST_CHECK
        self._seen: Tensor | None = None
        self._given: set[str] = set()
        self.shares = WeightShares()

    @property
    def next_check(self) -> int:
        """The update after which the bins are checked."""
        return self._next

    def after_update(self, learned: LearnedContour, updates: int) -> None:
        """Check the bins if a check is due."""
        if updates == self._next:
            self._next *= 2
            self._check_bins(learned)

    def finish(self, learned: LearnedContour, updates: int) -> None:
        """Check the bins at the end of the run."""
        if updates >= FIRST_CHECK:
            self._check_bins(learned)

    def _check_bins(self, learned: LearnedContour) -> None:
        visits = learned.state.visits.cpu()
        new = visits if self._seen is None else visits - self._seen
        total = float(new.sum())
        self._seen = visits.clone()
        if total < FIRST_CHECK:
            return
        partition = learned.partition
        if float(new[..., 0].sum()) > END_BIN_SHARE * total:
            self._warn(
                "first",
                f"nearly all energies of the last {total:.0f} steps lie below first_edge={partition.first_edge:.6g}, "
                "in the first bin, where the contour does nothing: lower first_edge, or learn the range from a longer "
                "warm-up.",
            )
        if float(new[..., -1].sum()) > END_BIN_SHARE * total:
            self._warn(
                "last",
                f"nearly all energies of the last {total:.0f} steps lie above the last edge "
                f"{partition.last_edge:.6g}: raise first_edge, num_bins or width, or learn the range from a longer "
                "warm-up.",
            )
        self._check_slopes(learned)

    def _check_slopes(self, learned: LearnedContour) -> None:
        rules = learned.rules
        log_vector, visits = learned.state.log_vector, learned.state.visits
        if rules.weighting == "bin" or rules.weight_exponent == 0:
            return
        both = (visits[..., 1:] > 0) & (visits[..., :-1] > 0)
        rise = rules.weight_exponent * rules.zeta * log_vector.diff(dim=-1).abs().masked_fill(~both, 0.0)
        steepest = float(rise.max())
        if steepest > STEEP:
            self._warn(
                "steep",
                f"log-weights change by up to {steepest:.3g} within one energy bin, so interpolated weights are "
                "useless: take narrower bins or a smaller zeta; if that is impossible, weighting='bin' and a small "
                "weight_exponent.",
            )

    def after_sample(self, log_weight: float, chain: int | None = None) -> None:
        """Record a sample's log-weight, with its chain if weights compare only there, and check the largest."""
        shares = self.shares
        shares.add(log_weight, chain)
        share = shares.largest or 0.0
        if shares.count >= FEW_SAMPLES and share > DOMINANT_WEIGHT:
            whose = "the weight" if chain is None else "its chain's weight"
            self._warn(
                "weight",
                f"one of {shares.count} samples has {100 * share:.0f} % of {whose}, so the average is "
                "that sample: temper the weights by weight_exponent < 1, take a smaller zeta or a lower temperature, "
                "or draw more samples.",
            )

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._given:
            self._given.add(key)
            self._emit(f"ContourGradient: {sentence}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, names and a tensor."""
        own = {"next": self._next, "seen": self._seen, "given": sorted(self._given)}
        return own | self.shares.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._next, self._seen, self._given = state["next"], state["seen"], set(state["given"])
        self.shares.load_state_dict(state)
