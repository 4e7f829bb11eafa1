"""The contour that a run has learned: its rules and its π, for weights after the run."""

import json
from dataclasses import asdict

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.contour.rules import Contour, ContourState


class LearnedContour:
    """The rules of a contour sampler with what was learned: it weighs samples by their energies.

    Args:
        rules: the rules.
        state: what was learned.
    """

    def __init__(self, rules: Contour, state: ContourState) -> None:
        self.rules = rules
        self.state = state

    @property
    def masses(self) -> Tensor:
        """The target's estimated mass in each bin, shape (m,) or (C, m), float64."""
        return self.rules.log_masses(self.state).exp()

    def log_weights(self, energies: Tensor, chains: Tensor | None = None) -> Tensor:
        """Return log importance weights by the π that is known now, up to a constant.

        Args:
            energies: of the samples, shape (S,), in nats.
            chains: index of each sample's chain, shape (S,); needed where every chain has a π of its own.
        """
        state = self.state
        if state.log_vector.dim() == 2:
            rows = torch.zeros(len(energies), dtype=torch.int64) if chains is None else chains
            state = ContourState(state.log_vector[rows], state.visits[rows])
        edges = self.rules.partition.edges(state.log_vector.device)
        return self.rules.log_weight(self.rules.locate(state, energies, 1.0, edges).log_density)

    def to_bytes(self) -> bytes:
        """Return the content of a safetensors file that `from_bytes` reads."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.state._asdict().items()}
        return save(tensors, {"rules": json.dumps(asdict(self.rules))})

    @classmethod
    def from_bytes(cls, content: bytes) -> "LearnedContour":
        """Return what `to_bytes` wrote.

        Raises:
            ValueError: if the content is damaged or something else.
        """
        try:
            length = int.from_bytes(content[:8], "little")
            rules = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["rules"])
            partition = EnergyPartition(**rules.pop("partition"))
            return cls(Contour(partition, **rules), ContourState(**load(content)))
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"this is no learned contour, or it is damaged: {error}") from error
