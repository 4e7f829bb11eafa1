"""Initial states of chains, and the layer that raised an exception."""

import warnings
from collections.abc import Callable

from torch import nn

from lightning_sgmcmc.chains.stateless import state_of


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
    frozen = [(p, p.detach().clone()) for p in module.parameters() if not p.requires_grad]
    own = state_of(module)
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
            reset()
            renewed.update(id(p) for p in part.parameters(recurse=False))
    for parameter, value in frozen:
        parameter.copy_(value)
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
