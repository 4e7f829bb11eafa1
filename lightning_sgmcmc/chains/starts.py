"""Initial states of chains, and the layer that raised an exception."""

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.sharing import shared_names
from lightning_sgmcmc.chains.stateless import state_of
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.expansion import expansions_of, is_expanded, reset_expanded, with_factors
from lightning_sgmcmc.files import check_regular
from lightning_sgmcmc.finite import first_not_finite
from lightning_sgmcmc.priors.held import held_rows
from lightning_sgmcmc.seeding import derive_seed, reseed, reseed_everything, unchanged_generators
from lightning_sgmcmc.tensors import exact

ChainStart: TypeAlias = "Literal['own', 'same'] | Sequence[Any]"
"""How chains start: "own", "same", or a state dict or file for each chain of the run."""


def check_start(start: ChainStart) -> None:
    """Raise unless chains can start so.

    Raises:
        ValueError: for another word, or no states.
        TypeError: for an entry that is neither a state dict nor a path.
    """
    if isinstance(start, str):
        check_choice("chain_start", start, ("own", "same"))
        return
    if isinstance(start, Mapping) or not isinstance(start, Sequence):
        raise TypeError(
            f"chain_start must be 'own', 'same' or a list with a state dict or path for each chain, got "
            f"{type(start).__name__}: pass a list, even for one chain"
        )
    if not start:
        raise ValueError("chain_start has no states: pass one for each chain, or 'own'")
    for place, entry in enumerate(start):
        if not isinstance(entry, Mapping | str | Path):
            raise TypeError(
                f"chain_start[{place}] must be a state dict or the path of a file, got a {type(entry).__name__}"
            )


def start_chain(
    model: nn.Module,
    start: ChainStart,
    layout: ChainLayout,
    index: int,
    seed: int,
    initialise: Callable[[int], None],
    shared: frozenset[str] = frozenset(),
) -> None:
    """Write a chain's initial state to a model's tensors.

    Args:
        model: the model, with one chain's tensors, changed in place.
        start: how chains start.
        layout: the chains of this process.
        index: the chain's index in this process.
        seed: the run's seed.
        initialise: draws the state of a chain into the model, for "own".
        shared: names of the tensors that all chains share, which only the first may set.

    Raises:
        ValueError: if the list of states has not one for each chain, a state does not fit the model, or two states
            have different values of a shared tensor.
    """
    chain, total = layout.chains[index], layout.total_chains
    if not isinstance(start, str):
        if len(start) != total:
            raise ValueError(
                f"chain_start has {len(start)} states, and the run has {total} chains (num_chains times the processes "
                "with chains of their own): pass one for each"
            )
        if not isinstance(start[chain], Mapping) and not _path_of(start[chain]).exists():
            return  # a resumed run needs no file; `check_files` raises in another one
        common = {id(tensor): name for name, tensor in state_of(model).items() if name in shared}
        for tensor, value in _fitting(model, read_state(start[chain], chain), chain, total):
            if index > 0 and id(tensor) in common:
                _check_common(tensor, value, common[id(tensor)], chain)
            else:
                tensor.copy_(value)
    elif start == "own" and chain > 0:
        device = next(model.parameters()).device
        with unchanged_generators([device]):
            reseed_everything(own := derive_seed(seed, "start", chain))
            reseed(own, device)
            initialise(chain)


def _check_common(tensor: Tensor, value: Tensor, name: str, chain: int) -> None:
    """Raise ValueError unless a chain's state has the first chain's values of a tensor that all chains share."""
    if not torch.equal(tensor, value.to(tensor)):
        raise ValueError(
            f"chain_start[{chain}] has other values of '{name}' than the first chain's, and all chains share what is "
            "not sampled: pass states with the same values of it, or sample it"
        )


def check_files(start: ChainStart, chains: Sequence[int]) -> None:
    """Raise if the file of a chain's start is missing.

    Args:
        start: how chains start.
        chains: global indices of this process's chains.

    Raises:
        FileNotFoundError: with the entry's place and path.
    """
    for chain in () if isinstance(start, str) else chains:
        if not isinstance(start[chain], Mapping) and not _path_of(start[chain]).exists():
            raise FileNotFoundError(
                f"chain_start[{chain}] = {start[chain]} does not exist: pass the path of a checkpoint, state dict or "
                "sample file"
            )


def _path_of(entry: "str | Path") -> Path:
    return Path(entry).expanduser().resolve()


def text_of_start(start: ChainStart) -> Any:
    """Return how chains start as plain data, to be compared when a run resumes: words, file names, sums of states."""
    if isinstance(start, str):
        return start
    return [
        f"{len(entry)} tensors of sum {sum(float(exact(t).sum()) for t in entry.values()):.9g}"
        if isinstance(entry, Mapping)
        else Path(entry).name
        for entry in start
    ]


def read_state(entry: "Mapping[str, Tensor] | str | Path", chain: int) -> dict[str, Tensor]:
    """Return a state by name: a state dict itself, or that of a checkpoint, a torch file or a sample file.

    Files are read without running any code of theirs.

    Raises:
        ValueError: if a file is damaged, holds other objects than tensors and plain data, or no state.
    """
    what = f"chain_start[{chain}]"
    content: Any = entry
    if not isinstance(entry, Mapping):
        path, what = _path_of(entry), f"{what} = {entry}"
        check_regular(path)
        try:
            if path.suffix == ".safetensors":
                content = {n.split(".", 1)[1]: t for n, t in load_file(path).items() if n[:7] in ("paramet", "buffer.")}
            else:
                content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).strip().split("\n")[0][:150]
            raise ValueError(f"{what} cannot be read safely ({reason}): pass another file") from error
        if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
            content = content["state_dict"]
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise ValueError(f"{what} holds no state dict, that is tensors by name: pass one, or a file with one")
    return dict(content)


def _fitting(model: nn.Module, state: dict[str, Tensor], chain: int, total: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a model's tensor and its value in a state.

    Raises:
        ValueError: if names or shapes differ, or a value is not finite.
    """
    own, what = state_of(model), f"chain_start[{chain}]"
    known = own.keys() | {expansion.name for expansion in expansions_of(model)}
    if not set(state) <= known and all(f"net.{name}" in known for name in state):
        state = {f"net.{name}": tensor for name, tensor in state.items()}  # of the network itself
    state = with_factors(state, model)
    unknown = [name for name in state if name not in own]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and name not in state]
    if unknown or missing:
        wrong = f"has no '{missing[0]}'" if missing else f"has '{unknown[0]}', which the network has not"
        raise ValueError(f"{what} {wrong}: pass the state of a network like this one")
    stacked = {len(t) for name, t in state.items() if t.dim() == own[name].dim() + 1 and t.shape[1:] == own[name].shape}
    if len(stacked) == 1 and all(t.dim() == own[name].dim() + 1 for name, t in state.items()):
        if stacked != {total}:
            raise ValueError(
                f"{what} holds {stacked.pop()} stacked chains, and the run has {total}: pass states of single chains, "
                "{name: tensor[c] for name, tensor in state.items()}"
            )
        state = {name: tensor[chain] for name, tensor in state.items()}
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{what} has '{name}' of shape {tuple(tensor.shape)}, and the network's is {tuple(own[name].shape)}: "
                "pass the state of a network like this one"
            )
    bad = first_not_finite(state.items())
    if bad is not None:
        raise ValueError(f"{what} holds NaN or infinite numbers in '{bad}': pass another state")
    return [(own[name], tensor) for name, tensor in state.items()]


def redraw(module: nn.Module, chain: int, rebuild: Callable[[], nn.Module] | None) -> None:
    """Draw a chain's initial state into a module's tensors; warn if a layer keeps its values.

    Args:
        module: the module, changed in place.
        chain: global index of the chain.
        rebuild: creates another module as the user did; None if unknown.
    """
    kept = draw_start(module, rebuild)
    if kept and chain == 1:  # in the one process that holds chain 1
        warnings.warn(
            f"All chains start with the same {', '.join(map(repr, kept))}: the layer has no reset_parameters. Define "
            f"initialise_chain(chain) of {type(module).__name__}, or pass chain_start='same'.",
            stacklevel=2,
        )


def draw_start(module: nn.Module, rebuild: Callable[[], nn.Module] | None) -> list[str]:
    """Reinitialise a module's trainable parameters, by its constructor or else by its layers.

    Args:
        module: the module, changed in place.
        rebuild: creates another one as the user did; None if unknown.

    Returns:
        the names of the trainable parameters that kept their values.
    """
    own, shared = state_of(module), shared_names(module)
    kept = [own[name].detach() for name in shared]
    kept += [own[name].detach()[row] for name, row in held_rows(module).items()]
    frozen = [(tensor, tensor.clone()) for tensor in kept]
    renewed: set[int] = set()
    fresh = rebuild() if rebuild is not None else None
    if fresh is not None:
        theirs = state_of(fresh)
        for name, tensor in own.items():
            if name in theirs and theirs[name] is not tensor and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
                renewed.add(id(tensor))
    for part in reversed(list(module.modules())):  # inner layers first, as in construction
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        # Frozen parts are skipped: resetting them would lose their buffers.
        if callable(reset) and any(id(p) not in renewed for p in part.parameters() if p.requires_grad):
            if is_expanded(part):
                reset_expanded(part)
            else:
                reset()
            renewed.update(id(p) for p in part.parameters(recurse=is_expanded(part)))
    for tensor, value in frozen:
        tensor.copy_(value)
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in renewed]


def layer_at_fault(error: BaseException, module: nn.Module) -> str | None:
    """Return the name of the innermost layer of a module that raised an exception, or None."""
    names = {id(part): f"'{name}' ({type(part).__name__})" for name, part in module.named_modules() if name}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = names.get(id(owner), found)
        trace = trace.tb_next
    return found
