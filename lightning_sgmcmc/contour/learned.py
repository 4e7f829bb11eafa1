"""What a run has learned about its energies, to weigh samples after the run."""

import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.contour.auto import ContourChoice
from lightning_sgmcmc.contour.contour import Contour, ContourState
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.contour.rules import ContourRules
from lightning_sgmcmc.contour.weight_shares import WeightShares
from lightning_sgmcmc.diagnostics.contour_use import ContourUse
from lightning_sgmcmc.files import parse_json
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
        state = self.state
        if state.log_vector.dim() == 2:
            rows = torch.zeros(len(energies), dtype=torch.int64) if chains is None else chains
            state = ContourState(state.log_vector[rows], state.visits[rows])
        edges = self.partition.edges(state.log_vector.device)
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
