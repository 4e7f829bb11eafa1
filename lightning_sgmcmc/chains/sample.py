"""One posterior sample, and its record in a store."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.samples import within_groups


@dataclass(repr=False)
class PosteriorSample:
    """One draw from the posterior: a chain's parameters and buffers, and their origin in the run.

    Attributes:
        step: optimizer steps made when it was drawn.
        cycle: index of the cycle, from 0 (0 throughout without cycles).
        chain: global index of the chain.
        energy: the step's mini-batch estimate Ũ of the potential energy (before the step's update), in nats; or U
            of the sample itself over all data, if a callback computed it.
        log_weight: log of its importance weight, up to a constant; 0 if samples are equally weighted.
        parameters: the sampled parameters of this chain's module by name, without a chain axis.
        buffers: all buffers, likewise (BatchNorm's running statistics, …).
        shared: the tensors that are not sampled and that all samples of a run have in common, by name: frozen
            parameters and the buffers of frozen parts. They are the same objects in all samples; do not change them.
        bin: bin of the energy, from 0; None without an energy partition.
        comparable: whether the constant in log_weight is the same for all chains. It is not if each chain learns its
            own π; weights are then normalised within each chain, and chains count alike.
        scales: standard deviation of each parameter under a `HierarchicalPrior`, drawn with it, each of shape (), by
            the parameter's name; empty with other priors.
        draw: its number, from 0, among the draws that a callback made of the chain's state at this step (networks from
            a SWAG Gaussian, dropout masks); 0 if the state itself is the sample.
    """

    step: int
    cycle: int
    chain: int
    energy: float
    log_weight: float = 0.0
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    bin: int | None = None
    comparable: bool = True
    scales: dict[str, Tensor] = field(default_factory=dict)
    draw: int = 0
    shared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors of the sample's network: parameters, buffers, and what is not sampled."""
        return {**self.shared, **self.parameters, **self.buffers}

    @property
    def own_state(self) -> dict[str, Tensor]:
        """The tensors in which samples differ: parameters and buffers."""
        return {**self.parameters, **self.buffers}

    def __repr__(self) -> str:
        numbers = sum(parameter.numel() for parameter in self.parameters.values())
        return (
            f"PosteriorSample(step={self.step}, chain={self.chain}, cycle={self.cycle}, energy={self.energy:.6g}, "
            f"log_weight={self.log_weight:.6g}, {numbers} parameters in {len(self.parameters)} tensors)"
        )


@dataclass(frozen=True)
class SampleRecord:
    """A sample's manifest entry (see `PosteriorSample`), with the name of its file ("" in memory) and the CRC-32 of the
    file's bytes in hexadecimal ("" if unknown)."""

    step: int
    cycle: int
    chain: int
    energy: float
    log_weight: float
    file: str = ""
    checksum: str = field(default="", compare=False)  # equal samples may be in files with another order
    bin: int | None = None
    comparable: bool = True
    draw: int = 0


def record_of(sample: PosteriorSample, file: str = "", checksum: str = "") -> SampleRecord:
    """Return a sample's record."""
    place = (sample.step, sample.cycle, sample.chain, sample.energy, sample.log_weight)
    return SampleRecord(*place, file, checksum, sample.bin, sample.comparable, sample.draw)


def comparable_log_weights(records: Sequence[SampleRecord]) -> Tensor:
    """Return the samples' log-weights with one constant for all, shape (S,), float64.

    They are those of the records, or normalised within each chain if the records' are not comparable.
    """
    log_weights = torch.tensor([record.log_weight for record in records], dtype=torch.float64)
    if all(record.comparable for record in records):
        return log_weights
    return within_groups(log_weights, torch.tensor([record.chain for record in records]))


def on_cpu(sample: PosteriorSample) -> PosteriorSample:
    """Return a copy of a sample in the host's memory; tensors that it shares with others are not copied."""
    parameters = {k: v.detach().to("cpu", copy=True) for k, v in sample.parameters.items()}
    buffers = {k: v.detach().to("cpu", copy=True) for k, v in sample.buffers.items()}
    scales = {k: v.detach().to("cpu", copy=True) for k, v in sample.scales.items()}
    return replace(sample, parameters=parameters, buffers=buffers, scales=scales)
