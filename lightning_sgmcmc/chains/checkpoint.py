"""A checkpoint format that does not depend on the layout of chains: one leading axis over all chains of the run.

A process with C chains holds tensors with a leading axis of size C, or plain ones where C = 1; a checkpoint of a run
with P chains holds them with an axis of size P, or plain ones where P = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.samples import PARTS, PosteriorSample


def join_tensors(parts: Sequence[Mapping[str, Tensor]], chains_each: int) -> dict[str, Tensor]:
    """Return the tensors of all chains.

    Args:
        parts: the tensors of each process, in the order of the chains.
        chains_each: C.
    """
    return {name: _join([part[name] for part in parts], chains_each) for name in parts[0]}


def split_tensors(whole: Mapping[str, Tensor], layout: ChainLayout) -> dict[str, Tensor]:
    """Return a process's part of what `join_tensors` returned.

    Raises:
        ValueError: if a tensor's number of chains is not the run's.
    """
    return {name: _split(tensor, layout) for name, tensor in whole.items()}


def join_sampler(parts: Sequence[dict[str, Any]], chains_each: int, shapes: Sequence[torch.Size]) -> dict[str, Any]:
    """Return the sampler state of all chains.

    Args:
        parts: each process's sampler `state_dict`, in the order of the chains.
        chains_each: C.
        shapes: shapes of the parameters in each process.
    """
    first = parts[0]
    own_axis = first["sampler"]["per_chain_state"]
    state: dict[Any, dict[str, Any]] = {}
    for key, own in first["state"].items():
        state[key] = {}
        for name, value in own.items():
            values = [part["state"][key][name] for part in parts]
            if isinstance(value, Tensor):
                # A value without the parameter's shape is one number per chain.
                per_chain = name in own_axis or value.shape != shapes[key]
                state[key][name] = _join(values, 2 if per_chain else chains_each)
            else:
                state[key][name] = value
    groups = [
        {name: _join_control([g[name] for g in same], chains_each) for name in same[0]}
        for same in zip(*(part["param_groups"] for part in parts), strict=True)
    ]
    noise = [part["sampler"]["noise"] for part in parts]
    sampler = dict(first["sampler"]) | {
        "num_chains": chains_each * len(parts),
        "noise": dict(noise[0]) | {"generators": [g for one in noise for g in one["generators"]]},
    }
    return dict(first) | {"state": state, "param_groups": groups, "sampler": sampler}


def split_sampler(whole: dict[str, Any], layout: ChainLayout, shapes: Sequence[torch.Size]) -> dict[str, Any]:
    """Return a process's part of what `join_sampler` returned.

    Args:
        whole: the state of all chains.
        layout: which of the chains this process holds.
        shapes: shapes of the parameters in this process.

    Raises:
        ValueError: if the state has another number of chains.
    """
    if "sampler" not in whole:
        return whole
    if whole["sampler"]["num_chains"] != layout.total_chains:
        raise ValueError(
            f"the checkpoint has {whole['sampler']['num_chains']} chains, this run has {layout.total_chains}: use "
            "the same number (processes x num_chains / ranks_per_chain)"
        )
    own_axis = whole["sampler"].get("per_chain_state", ())  # version 0.1.0 does not name them
    state = {}
    for key, own in whole["state"].items():
        state[key] = dict(own)
        for name, value in own.items():
            if isinstance(value, Tensor):
                plain = layout.num_chains == 1 and name not in own_axis and value.shape[1:] == shapes[key]
                state[key][name] = _split(value, layout) if plain else layout.own(value)
    groups = [{name: _split_control(v, layout) for name, v in g.items()} for g in whole["param_groups"]]
    noise = dict(whole["sampler"]["noise"])
    if noise["generators"]:
        noise["generators"] = [noise["generators"][chain] for chain in layout.chains]
    sampler = dict(whole["sampler"]) | {"num_chains": layout.num_chains, "noise": noise}
    return dict(whole) | {"state": state, "param_groups": groups, "sampler": sampler}


def _join(tensors: Sequence[Tensor], chains_each: int) -> Tensor:
    return torch.cat(list(tensors)) if chains_each > 1 else torch.stack(list(tensors))


def _split(tensor: Tensor, layout: ChainLayout) -> Tensor:
    if tensor.dim() == 0 or len(tensor) != layout.total_chains:
        raise ValueError(
            f"the checkpoint holds a tensor of shape {tuple(tensor.shape)}, and this run has {layout.total_chains} "
            "chains, which should be its first axis: use as many chains as the checkpoint has"
        )
    return layout.own_stored(tensor)


def _join_control(values: Sequence[Any], chains_each: int) -> Any:
    """Return one number if all chains share it, else one per chain."""
    first = values[0]
    if not isinstance(first, float | Tensor):
        return first
    if not any(isinstance(value, Tensor) for value in values) and all(value == first for value in values):
        return first
    each = [torch.as_tensor(value).detach().cpu().reshape(-1).expand(chains_each) for value in values]
    return torch.cat(each)


def _split_control(value: Any, layout: ChainLayout) -> Any:
    if not isinstance(value, Tensor) or value.numel() != layout.total_chains:
        return value
    own = layout.own(value)
    return own.item() if layout.num_chains == 1 else own


# -- packing -----------------------------------------------------------------------------------------------------------


NUMBERS = tuple(field.name for field in fields(PosteriorSample) if field.name not in (*PARTS, "shared"))
KINDS = (int, float, bool)
"""Types of the other fields, which may also be None; float64 holds them exactly, integers below 2^53."""


class SampleRows:
    """The form of a run's samples: which tensors they hold, and where each lies in a row.

    Args:
        sample: any of them; all samples of a run have its form.
    """

    def __init__(self, sample: PosteriorSample) -> None:
        self._places: list[tuple[str, str, torch.dtype, torch.Size, slice]] = []
        sizes: dict[torch.dtype, int] = {}
        for part in PARTS:
            for name, tensor in getattr(sample, part).items():
                start = sizes.get(tensor.dtype, 0)
                sizes[tensor.dtype] = start + tensor.numel()
                place = slice(start, start + tensor.numel())
                self._places.append((part, name, tensor.dtype, tensor.shape, place))
        self.dtypes = tuple(sizes)
        self._shared = sample.shared

    def pack(self, samples: Sequence[PosteriorSample], device: torch.device) -> list[Tensor]:
        """Return the samples' tensors, one tensor (S, P) on a device for each of `dtypes`."""
        packed = []
        for dtype in self.dtypes:
            names = [(part, name) for part, name, own, *_ in self._places if own == dtype]
            flat = [getattr(sample, part)[name].reshape(-1).to(device) for sample in samples for part, name in names]
            packed.append(torch.cat(flat).view(len(samples), -1))
        return packed

    def unpack(self, rows: Sequence[Tensor], numbers: Tensor) -> Iterator[PosteriorSample]:
        """Yield the samples that `pack` and `numbers_of` were given; each owns its tensors.

        Args:
            rows: one tensor (S, P) for each of `dtypes`.
            numbers: shape (S, 2·F).
        """
        for index, own in enumerate(numbers.tolist()):
            row = {dtype: tensor[index].clone() for dtype, tensor in zip(self.dtypes, rows, strict=True)}
            held: dict[str, Any] = {part: {} for part in PARTS}
            for part, name, dtype, shape, place in self._places:
                held[part][name] = row[dtype][place].view(shape)
            yield PosteriorSample(**_numbers(own), **held, shared=self._shared)


def numbers_of(samples: Sequence[PosteriorSample]) -> Tensor:
    """Return the values of the samples' other fields and their types, shape (S, 2·F), float64, in the host's memory."""
    table = []
    for sample in samples:
        values = [getattr(sample, name) for name in NUMBERS]
        kinds = [-1 if value is None else KINDS.index(type(value)) for value in values]
        table.append([0.0 if value is None else float(value) for value in values] + list(map(float, kinds)))
    return torch.tensor(table, dtype=torch.float64)


def _numbers(row: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value, kind in zip(NUMBERS, row[: len(NUMBERS)], row[len(NUMBERS) :], strict=True):
        found[name] = None if kind < 0 else KINDS[int(kind)](value)
    return found
