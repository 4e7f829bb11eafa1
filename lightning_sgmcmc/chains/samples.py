"""Posterior samples from the chains' current states, drawn, packed and sent to the host."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.diagnostics.draws import within_groups
from lightning_sgmcmc.expansion import collapsed
from lightning_sgmcmc.model import named_trainable, of_prior
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.tensors import STATISTICS, as_rows, exact, exact_device

Parts = dict[str, dict[str, Tensor]]
"""A sample's parameters, buffers and scales, each by name."""
PARTS = ("parameters", "buffers", "scales")
"""The fields of a sample that hold tensors by name."""


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
        temperature: that of its step; also 1 if unknown, as in stores of earlier versions and networks from elsewhere.
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
    temperature: float = 1.0

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

    IF_SET: ClassVar = ("comparable", "draw", "temperature")

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
    temperature: float = 1.0


def record_of(sample: PosteriorSample, file: str = "", checksum: str = "") -> SampleRecord:
    """Return a sample's record."""
    place = (sample.step, sample.cycle, sample.chain, sample.energy, sample.log_weight)
    return SampleRecord(*place, file, checksum, sample.bin, sample.comparable, sample.draw, sample.temperature)


def rounded(temperature: float) -> float:
    """Return a sample's temperature to six digits, the same from a number and from a tensor in 32 bits."""
    return float(f"{temperature:.6g}")


def comparable_log_weights(records: Sequence[SampleRecord]) -> Tensor:
    """Return the log-weights, shape (S,), float64: the records', or normalised within each chain if not comparable."""
    log_weights = torch.tensor([record.log_weight for record in records], dtype=torch.float64)
    if all(record.comparable for record in records):
        return log_weights
    return within_groups(log_weights, torch.tensor([record.chain for record in records]))


def on_cpu(sample: PosteriorSample) -> PosteriorSample:
    """Return a copy of a sample in the host's memory; tensors that it shares with others are not copied."""
    copies: dict[str, Any] = {}
    for part in PARTS:
        copies[part] = {k: v.detach().to("cpu", copy=True) for k, v in getattr(sample, part).items()}
    return replace(sample, **copies)


# -- transfers ---------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies of tensors in host memory, pinned for a CUDA device, which makes them while the host continues."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        self._copies = [_copy(tensor.detach()) for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if device is not None:
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Return the copies, once they are complete."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = None
        return self._copies


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


# -- drawing -----------------------------------------------------------------------------------------------------------


class FlatStates:
    """Copies of the states of C chains, one tensor (C, P) for each dtype; `parts` have a leading axis where C > 1.

    Each tensor begins at an even column, so that pairs of numbers in its last axis can be viewed as complex ones.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Tensor]], num_chains: int) -> None:
        self._num_chains = num_chains
        self._names: dict[torch.dtype, list[tuple[str, str, torch.Size]]] = {}
        """Part, name and shape of each tensor in the flat tensor of a dtype, in the order of its columns."""
        self._order = {part: list(parts[part]) for part in PARTS}
        self._ends: dict[torch.dtype, dict[int, int]] = {}
        """The ends of the columns of parameters, running statistics, other buffers and scales, by dtype."""
        rows: dict[torch.dtype, list[Tensor]] = {}
        statistics = {name: tensor for name, tensor in parts["buffers"].items() if name.endswith(STATISTICS)}
        others = {name: tensor for name, tensor in parts["buffers"].items() if name not in statistics}
        kinds = (("parameters", parts["parameters"]), ("buffers", statistics), ("buffers", others))
        for kind, (part, tensors) in enumerate((*kinds, ("scales", parts["scales"]))):
            for name, tensor in tensors.items():
                row = as_rows(tensor.detach(), num_chains)
                rows.setdefault(tensor.dtype, []).extend([row, row[:, :1]] if row.shape[1] % 2 else [row])
                shape = tensor.shape[1:] if num_chains > 1 else tensor.shape
                self._names.setdefault(tensor.dtype, []).append((part, name, shape))
            for dtype, pieces in rows.items():
                self._ends.setdefault(dtype, {})[kind] = sum(piece.shape[1] for piece in pieces)
        self.flat = {dtype: torch.cat(pieces, 1) for dtype, pieces in rows.items()}

    def of_chain(self, row: int, flat: Mapping[torch.dtype, Tensor] | None = None) -> dict[str, Any]:
        """Return a chain's tensors, which are views; `flat`, copies of the flat states, is read instead."""
        flat = self.flat if flat is None else flat
        found: Parts = {part: {} for part in PARTS}
        for dtype, names in self._names.items():
            sizes = [shape.numel() for _, _, shape in names]
            pieces = flat[dtype][row].split([size + size % 2 for size in sizes])
            for (part, name, shape), size, piece in zip(names, sizes, pieces, strict=True):
                found[part][name] = piece[:size].view(shape)
        return {part: {name: found[part][name] for name in names} for part, names in self._order.items()}

    def suspects(self) -> Tensor:
        """Return for each chain, shape (C,), whether a number may be NaN or infinite, or of another buffer NaN."""
        # Masks often have infinities. A sum of finite numbers may overflow, so a suspect is to be examined.
        found: list[Tensor] = []
        for dtype, flat in self.flat.items():
            if not dtype.is_floating_point:
                continue
            ends, wide = self._ends[dtype], torch.promote_types(dtype, torch.float32)
            finite, numbers = ends.get(1, ends.get(0, 0)), ends.get(2, ends.get(1, ends.get(0, 0)))
            found.append(~flat[:, :finite].sum(1, dtype=wide).isfinite())
            found.append(flat[:, finite:numbers].sum(1, dtype=wide).isnan())
        return torch.stack(found).any(0) if found else torch.zeros(self._num_chains, dtype=torch.bool)


class Drawing:
    """Samples that are drawn together, each of tensors of its own or of views of a row of the flat states; `is_own`
    says whether this process has their chains."""

    def __init__(
        self,
        samples: Sequence[PosteriorSample],
        states: FlatStates | None = None,
        rows: Sequence[int] = (),
        is_own: bool = True,
    ) -> None:
        self.samples = list(samples)
        self.is_own = is_own
        self._states = states
        self._rows = list(rows)
        self._copies: HostCopies | None = None

    def host_copy(self, sample: PosteriorSample) -> Callable[[], PosteriorSample]:
        """Return a function that returns the sample in host memory, once the device has copied the whole drawing."""
        place = next((i for i, own in enumerate(self.samples) if own is sample), None)
        if place is None:
            return Drawing([sample]).host_copy(sample)
        if self._copies is None:
            self._copies = HostCopies(self._originals())
        return lambda: self._on_host(place)

    @property
    def on_cuda(self) -> bool:
        """Whether the samples are in a CUDA device's memory."""
        return any(tensor.device.type == "cuda" for tensor in self._originals())

    def _originals(self) -> list[Tensor]:
        if self._states is not None:
            return list(self._states.flat.values())
        return [t for sample in self.samples for part in PARTS for t in getattr(sample, part).values()]

    def _on_host(self, place: int) -> PosteriorSample:
        assert self._copies is not None
        copies, sample = self._copies.wait(), self.samples[place]
        if self._states is not None:
            flat = dict(zip(self._states.flat, copies, strict=True))
            return replace(sample, **self._states.of_chain(self._rows[place], flat))
        parts: dict[str, Any] = {}
        remaining = iter(copies)
        for own in self.samples[: place + 1]:
            parts = {part: {name: next(remaining) for name in getattr(own, part)} for part in PARTS}
        return replace(sample, **parts)


# -- replicas ----------------------------------------------------------------------------------------------------------


PRIME = 2**31 - 1
SUMMED, SUMMED_ON_CPU = 2**22, 2**18
"""Numbers that are summed at once, for which a CPU makes copies of twice the width."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: list[Tensor]) -> Tensor:
    """Return a number below 2³¹ that changes with any bit of the tensors, up to chance, shape (), on their device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors, 1):
        bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()])
        parts = bits.split(SUMMED_ON_CPU if bits.device.type == "cpu" else SUMMED)
        added = [part.sum(dtype=torch.int64) for part in parts]
        total = (total + place * (sum(added, torch.zeros_like(total)) % PRIME)) % PRIME
    return total


def check_replicas(chains: Chains, step: int) -> None:
    """Compare the chains of this process among the ranks that share them, by one reduction; all of these call it."""
    layout = chains.layout
    if layout.ranks_per_chain == 1:
        return
    sums = torch.zeros(layout.ranks_per_chain, dtype=torch.float64, device=exact_device(chains.model.device))
    sums[layout.rank_in_chain] = exact(checksum(list(chains.trainable.values())))
    found = layout.mean_over_data(sums).tolist()
    first = layout.first_chain // layout.num_chains * layout.ranks_per_chain
    others = [first + rank for rank, value in enumerate(found) if value != found[0]]
    if others:
        which = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        raise RuntimeError(
            f"{which} other parameters than rank {first} at step {step}, and they share chain {layout.first_chain}, so "
            "its samples would be of no posterior: use one model of GPU, the same versions, deterministic layers and a "
            "sampler that passes its seed on"
        )


# -- samples -----------------------------------------------------------------------------------------------------------


def check_trainable(chains: Chains) -> None:
    """Raise RuntimeError if a sampled parameter is frozen, which steps of several chains and in blocks do not see."""
    frozen = next((name for name, p in chains.trainable.items() if not p.requires_grad), None)
    if frozen is not None:
        raise RuntimeError(
            f"'{frozen}' was frozen during the run, so this state is not a posterior sample: freeze parameters "
            "before the fit"
        )


def draw_samples(
    chains: Chains, sampler: Sampler, check: Callable[[PosteriorSample], None], all_tensors: bool = True
) -> Iterator[Drawing]:
    """Return the chains' current states as samples, one per chain of the run, in their order; without `all_tensors`,
    those of other processes' chains are numbers alone.

    The states are copied and their numbers read together, so the host waits for the device once. The claim "expand
    samples" turns each state into `tags.draws` samples. All processes iterate over the drawings together.
    """
    check_trainable(chains)
    for name, parameter in named_trainable(chains.model).items():
        if name not in chains.trainable:
            raise RuntimeError(
                f"'{name}' requires gradients since the run began, and is not sampled in it: unfreeze parameters "
                "before a fit, such as a second one of this module"
            )
        if parameter is not chains.trainable[name]:
            raise RuntimeError(
                f"'{name}' was replaced by another parameter during the run, and the sampler moves the former one: "
                "change its numbers, by parameter.copy_(…) under torch.no_grad()"
            )
    check_replicas(chains, sampler.step_count)
    chains.share_buffers()
    prepare = chains.claims.get("prepare samples")
    if prepare is not None:
        prepare()
    layout, expand = chains.layout, chains.claims.get("expand samples")
    states = _flat_states(chains)
    samples = _own_samples(chains, states, sampler, check)
    if expand is None and not layout.is_spread:
        yield _drawing(chains, samples, range(len(samples)), states)
        return
    own: Iterable[PosteriorSample] = samples if expand is None else _expanded(samples, expand, check)
    if not layout.is_spread:
        chosen = (sample for sample in own if _is_chosen(chains, sample))
        while together := list(itertools.islice(chosen, chains.num_chains)):
            yield Drawing(together)
        return
    own = list(own)
    everyone = layout.strategy.share_samples(own, all_tensors)
    for first in range(0, layout.total_chains, layout.num_chains):
        of_group, is_own = list(itertools.islice(everyone, len(own))), first == layout.first_chain
        for start in range(0, len(own), chains.num_chains):
            rows = range(start, min(start + chains.num_chains, len(own)))
            drawing = _drawing(chains, of_group, rows, states if is_own and expand is None else None, is_own)
            if drawing.samples:
                yield drawing


def _drawing(
    chains: Chains, samples: Sequence[PosteriorSample], rows: range, states: FlatStates | None, is_own: bool = True
) -> Drawing:
    """Return the drawing of those of some samples that are to be drawn."""
    chosen = [row for row in rows if _is_chosen(chains, samples[row])]
    return Drawing([samples[row] for row in chosen], states, chosen, is_own)


def _flat_states(chains: Chains) -> FlatStates:
    """Return a copy of the states of this process's chains."""
    model, scales = chains.model, []
    for index in range(chains.num_chains):
        with chains.at(index):
            scales.append(model.prior.scales(of_prior(model)) if isinstance(model.prior, HierarchicalPrior) else {})
    together = scales[0]
    if chains.num_chains > 1:
        together = {name: torch.stack([own[name] for own in scales]) for name in scales[0]}
    sampled = {name: p.detach() for name, p in model.named_parameters() if name not in chains.sharing.names}
    parts: Parts = {
        "parameters": collapsed(sampled, model, chains.num_chains),
        "buffers": {
            name: buffer
            for name, buffer in model.named_buffers()
            if name not in chains.sharing.names and not is_prior_state(name)
        },
        "scales": together,
    }
    return FlatStates(parts, chains.num_chains)


def _own_samples(
    chains: Chains, states: FlatStates, sampler: Sampler, check: Callable[[PosteriorSample], None]
) -> list[PosteriorSample]:
    """Return the states of this process's chains as samples, all of which are valid."""
    tags, layout = chains.tags, chains.layout
    energy = layout.mean_over_data(chains.observed.energy) if tags.energy is None else tags.energy
    control = torch.as_tensor(sampler.param_groups[0]["temperature"]).expand(chains.num_chains)
    numbers = [energy, tags.log_weight, states.suspects(), control, *([] if tags.bin is None else [tags.bin])]
    energies, log_weights, suspects, temperatures, *bins = (n.reshape(-1).tolist() for n in HostCopies(numbers).wait())
    shared = chains.sharing.tensors()
    samples = [
        PosteriorSample(
            step=sampler.step_count,
            cycle=chains.progress.cycle,
            chain=chain,
            energy=energies[index],
            log_weight=log_weights[index],
            bin=bins[0][index] if bins else None,
            comparable=tags.comparable,
            temperature=rounded(temperatures[index]),
            shared=shared,
            **states.of_chain(index),
        )
        for index, chain in enumerate(layout.chains)
    ]
    for sample in itertools.compress(samples, suspects):
        check(sample)
    return samples


def _expanded(
    samples: Iterable[PosteriorSample],
    expand: Callable[[PosteriorSample], Iterable[PosteriorSample]],
    check: Callable[[PosteriorSample], None],
) -> Iterator[PosteriorSample]:
    for sample in samples:
        for drawn in expand(sample):
            check(drawn)
            yield drawn


def _is_chosen(chains: Chains, sample: PosteriorSample) -> bool:
    """Label a sample as its chain is labelled, and return whether samples of that label are drawn."""
    tags = chains.tags
    if tags.labels is not None:
        sample.chain = tags.labels[sample.chain]
    return sample.chain in tags.sampled
