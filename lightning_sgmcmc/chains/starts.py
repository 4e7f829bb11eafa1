"""Where chains start, and the tensors that chains share."""

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_sgmcmc.chains.execution import Home, homes_of, put, restored, state_of
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.checks import check_choice, check_flag
from lightning_sgmcmc.expansion import expansions_of, is_expanded, reset_expanded, with_factors
from lightning_sgmcmc.files import check_regular
from lightning_sgmcmc.priors.centers import unwrapped
from lightning_sgmcmc.priors.state import held_rows, is_prior_state
from lightning_sgmcmc.seeding import derive_seed, reseed, reseed_everything, unchanged_generators
from lightning_sgmcmc.tensors import exact, first_not_finite

ChainStart: TypeAlias = "Literal['own', 'same'] | Sequence[Any]"
"""How chains start: "own", "same", or a state dict or file for each chain of the run."""


def check_start(start: ChainStart) -> None:
    """Raise unless chains can start so."""
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
    """Write a chain's initial state to the tensors of a model with one chain's."""
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no layers to start chains of: pass net=…, also in "
            "load_from_checkpoint(path, net=…), or define layers"
        )
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
                if not torch.equal(tensor, value.to(tensor)):
                    raise ValueError(
                        f"chain_start[{chain}] has other values of '{common[id(tensor)]}' than the first chain's, and "
                        "all chains share what is not sampled: pass states with the same values of it, or sample it"
                    )
            else:
                tensor.copy_(value)
    elif start == "own" and chain > 0:
        device = next(model.parameters()).device
        # Lightning makes a module's tensors on the run's device here; a start is the same wherever the run is.
        with unchanged_generators([device]), torch.device("cpu"):
            reseed_everything(own := derive_seed(seed, "start", chain))
            reseed(own, device)
            initialise(chain)


def check_files(start: ChainStart, chains: Sequence[int]) -> None:
    """Raise if the file of a chain's start is missing."""
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
    """Return a state by name: a state dict itself, or that of a checkpoint, torch or sample file; no code is run."""
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
    """Return pairs of a model's tensor and its value in a state."""
    own, what = state_of(model), f"chain_start[{chain}]"
    known = own.keys() | {expansion.name for expansion in expansions_of(model)}
    if not set(state) <= known:
        state = {name if name in known else unwrapped(name): tensor for name, tensor in state.items()}
        # Of the network itself, or of a part of something else, such as "model.".
        first = next((name.removeprefix(NETWORK) for name, _ in model.named_parameters()), "")
        beginnings = {name.removesuffix(first) for name in state if name.endswith(f".{first}")} - {NETWORK}
        for beginning in ("", *beginnings) if len(beginnings) < 2 else ("",):
            if all(name.startswith(beginning) and NETWORK + name.removeprefix(beginning) in known for name in state):
                state = {NETWORK + name.removeprefix(beginning): tensor for name, tensor in state.items()}
                break
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
    """Draw a chain's trainable parameters, by the module's constructor or its layers; warn of those that stay."""
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
    same = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in renewed]
    if same and chain == 1:  # in the one process that holds chain 1
        name = type(module).__name__
        warnings.warn(
            f"All chains start with the same {', '.join(map(repr, same))}: {_class_of(module, same[0])} has no "
            f"reset_parameters() that draws them. Define it, or initialise_chain(chain) of {name}, or pass "
            "chain_start='same'.",
            stacklevel=2,
        )


def _class_of(module: nn.Module, name: str) -> str:
    """Return the class that holds a parameter and is not torch's own, as a list of parameters is."""
    path = name.rpartition(".")[0]
    while path and type(module.get_submodule(path)).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    return type(module.get_submodule(path)).__name__ if path else "the layer"


# -- sharing -----------------------------------------------------------------------------------------------------------

# All chains share frozen parameters and the buffers of frozen parts. They have no chain axis, samples do not contain
# them, and a store has them once.

NETWORK = "net."
"""The beginning of the parameters' names of a network that was passed; patterns may leave it out."""
LIKELIHOOD = "likelihood."
"""The beginning of the names of a likelihood's parameters, which are always sampled."""


def freeze(module: nn.Module, sampled: Sequence[str], argument: str = "sampled") -> None:
    """Let a network's parameters require gradients where a pattern matches; the likelihood's stay as they are."""
    names = [name for name, _ in module.named_parameters() if not name.startswith(LIKELIHOOD)]
    for pattern in sampled:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(
                f"{argument}: {pattern!r} matches no parameter of {type(module).__name__} (it has "
                f"{', '.join(names[:4])}, …): correct the pattern, such as '*.fc.*'"
            )
    for name, parameter in module.named_parameters():
        if not name.startswith(LIKELIHOOD):
            parameter.requires_grad_(any(_matches(name, pattern) for pattern in sampled))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix(NETWORK), pattern)


def frozen_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts of a module that have parameters, none of which requires gradients, with their names."""
    pending = list(module.named_children())
    while pending:
        name, part = pending.pop(0)
        parameters = list(part.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            yield name, part
        else:
            pending = [(f"{name}.{own}", child) for own, child in part.named_children()] + pending


def shared_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that all chains share: frozen parameters, their parts' buffers, and constants."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    if not frozen:
        return frozenset()
    parts = tuple(f"{name}." for name, _ in frozen_parts(module))
    persistent = module.state_dict().keys()
    # A buffer that a state dict leaves out is a constant.
    buffers = (name for name, _ in module.named_buffers() if not is_prior_state(name))
    return frozenset(frozen | {name for name in buffers if name.startswith(parts) or name not in persistent})


def keys_of(module: nn.Module, names: frozenset[str]) -> set[str]:
    """Return the keys of a state dict under which it has the tensors with these names, several for tied ones."""
    state = state_of(module)
    tensors = {id(state[name]) for name in names}
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {key for key, tensor in everything if id(tensor) in tensors}


class Sharing:
    """What the chains of a module share, since it is not sampled; `names` has its tensors, once chains begin."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.sampled: tuple[str, ...] | None = None
        self.dropout = False
        self.names: frozenset[str] = frozenset()
        self._agreed = False
        """Whether all processes have the same shared tensors."""
        self._switched: list[nn.Module] = []
        """The layers that a fit has set to evaluation mode."""

    def choose(self, sampled: Sequence[str] | None, dropout: bool) -> None:
        """Set what is sampled, by the module's arguments."""
        if isinstance(sampled, str) or not all(isinstance(pattern, str) for pattern in sampled or ()):
            raise TypeError(f"sampled must be a list of name patterns, such as ['*.fc.*'], got {sampled!r}")
        check_flag("frozen_dropout", dropout)
        self.sampled, self.dropout = None if sampled is None else tuple(sampled), dropout

    def begin(self) -> None:
        """Freeze what is not sampled, and note what is shared."""
        if self.sampled is not None:
            freeze(self._module, self.sampled)
        self.names = shared_names(self._module)

    def tensors(self) -> dict[str, Tensor]:
        """Return the shared tensors by name."""
        state = state_of(self._module) if self.names else {}
        return {name: tensor.detach() for name, tensor in state.items() if name in self.names}

    def agree(self, layout: ChainLayout) -> None:
        """Take the first process's shared tensors, once, since networks may be drawn unseeded; all call it."""
        if self.names and layout.is_spread and not self._agreed:
            layout.strategy.share_first(self.tensors().values())
            self._agreed = True

    def check(self, sampled: Iterable[str]) -> None:
        """Raise if one of the parameters to be sampled is shared by stacked chains."""
        thawed = next((name for name in sampled if name in self.names), None)
        if thawed is not None:
            raise ValueError(
                f"'{thawed}' requires gradients now, but it was frozen when the chains began, and they share it: "
                "create a new module in which it is sampled"
            )

    def check_state(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise if a state of stacked chains is of chains that share other tensors than these."""
        own = self._module.state_dict()
        for key in own.keys() & state_dict.keys():
            there, here = state_dict[key].shape, own[key].shape
            if there[1:] == here and there != here:
                where = "sampled there, and not here"
            elif here[1:] == there and there != here:
                where = "sampled here, and not there"
            else:
                continue
            raise ValueError(
                f"the checkpoint is of a run that samples other parameters: '{key}' is {where}; pass the same sampled=…"
            )

    def set_evaluating(self) -> None:
        """Set frozen parts, or with dropout only their normalisation layers, to evaluation mode, for one fit."""
        for _, part in frozen_parts(self._module):
            for layer in part.modules():
                if layer.training and (not self.dropout or isinstance(layer, _NormBase)):
                    layer.training = False
                    self._switched.append(layer)

    def set_back(self) -> None:
        """Set these parts to training mode again, since the next fit may sample them."""
        for layer in self._switched:
            layer.training = True
        self._switched.clear()


class Holder:
    """Puts tensors in the place of a module's own for a while; what has the same values stays, and is compared once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[str, list[Home]] = {}
        self._compared: dict[str, tuple[Tensor, int, Tensor, int, Tensor | None]] = {}
        """By name two tensors, each with its changes in place so far, and what takes the first one's place."""

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the context, the module has these tensors, which come by name, on any device."""
        if tensors and not self._places:
            self._places = homes_of(self._module)
        with restored(self._places[name] for name in tensors):
            for name, tensor in tensors.items():
                home, key = self._places[name][0]
                other = self._other(name, home[key], tensor)
                if other is not None:
                    put(self._places[name], other)
            yield

    def _other(self, name: str, own: Tensor, tensor: Tensor) -> Tensor | None:
        """Return what is to take the place of a module's own tensor, or None if that has the same values."""
        countable = not (own.is_inference() or tensor.is_inference())  # changes of inference tensors are not counted
        if countable and name in self._compared:
            mine, my_version, theirs, their_version, other = self._compared[name]
            unchanged = (my_version, their_version) == (own._version, tensor._version)
            if mine is own and theirs is tensor and unchanged:
                return other
        moved = tensor.to(own.device)
        same = own is tensor or (own.shape == moved.shape and torch.equal(own, moved.to(own.dtype)))
        other = None if same else moved
        if countable:
            self._compared[name] = (own, own._version, tensor, tensor._version, other)
        return other
