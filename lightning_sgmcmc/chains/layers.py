"""What a network must be for its chains: layers that a sample can fill, and a forward pass that computes from them.

Chains, samples and blocks of steps put other numbers in the place of a network's parameters. So what it computes must
depend on its parameters, buffers and inputs alone: not on a parameter that it reaches by another way than its name, nor
on what the forward pass before has left in a plain attribute.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lightning_sgmcmc.chains.execution import (
    StatelessCall,
    UnfinishedBufferError,
    cloned,
    fault_of_parameter,
    same_numbers,
    state_of,
)
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.model import EnergyModel, named_trainable
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.seeding import unchanged_generators

# -- layers ------------------------------------------------------------------------------------------------------------


def prepare_layers(model: nn.Module) -> None:
    """Raise for layers that cannot be sampled, and let embeddings have dense gradients, as the prior's is."""
    check_memory(model)
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"'{name}' is scripted by torch.jit, so its parameters cannot be replaced by a sample's: pass the "
                "module that was scripted"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.weight.requires_grad:
            if part.max_norm is not None:
                raise ValueError(
                    f"'{name}' has max_norm={part.max_norm:g}, so each forward pass rescales rows of the weights, "
                    "which the sampler does not know: omit max_norm (the prior bounds the weights), or freeze the layer"
                )
            if part.scale_grad_by_freq:
                raise ValueError(
                    f"'{name}' has scale_grad_by_freq=True, so its gradients are not those of the potential energy: "
                    "pass scale_grad_by_freq=False, or freeze the layer"
                )
            part.sparse = False
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"the buffer '{name}' is a sparse tensor, which samples cannot hold: register it dense, or keep "
                "it in a plain attribute"
            )


# -- memory ------------------------------------------------------------------------------------------------------------


def check_memory(model: nn.Module) -> None:
    """Raise if something that is sampled has numbers in common with another parameter or buffer, in memory."""
    sampled, held = named_trainable(model), dict[Any, list[tuple[int, int, str, Tensor]]]()
    for name, tensor in state_of(model).items():
        if is_lazy(tensor) or tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        first = int(tensor.storage_offset())
        last = first + sum(
            int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        place = tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr()
        held.setdefault(place, []).append((first, last, name, tensor))
    for tensors in held.values():
        tensors.sort(key=lambda entry: entry[:2])
        reach = -1
        for first, last, _, tensor in tensors:
            if first <= reach or last - first + 1 < tensor.numel():
                _check_places([(name, tensor) for _, _, name, tensor in tensors], sampled)
                break
            reach = last


def _check_places(tensors: list[tuple[str, Tensor]], sampled: Mapping[str, Tensor]) -> None:
    """Raise if two tensors of one storage, of which one is sampled, have an element in common."""
    elements = max(tensor.untyped_storage().nbytes() // tensor.element_size() for _, tensor in tensors)
    places, owner = torch.arange(elements), torch.full((elements,), -1)
    for index, (name, tensor) in enumerate(tensors):
        own = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)
        if name in sampled and len(own.unique()) < len(own):
            raise ValueError(f"elements of '{name}' share memory, as those of an expanded tensor do: pass a copy of it")
        for other in owner[own].unique().tolist():
            if other >= 0 and (name in sampled or tensors[other][0] in sampled):
                raise ValueError(
                    f"'{tensors[other][0]}' and '{name}' share memory, and each chain and sample has its own of both: "
                    "assign one nn.Parameter to both to tie them, compute one from the other in forward, or pass a copy"
                )
        owner[own] = index


# -- hooks that change gradients --------------------------------------------------------------------------------------


def check_hooks(model: nn.Module) -> None:
    """Raise if a hook changes the gradient of something that is sampled, since the chain would not sample exp(-U)."""
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ValueError(
                f"'{name or type(model).__name__}' has a backward hook, which may change gradients, and the chain "
                f"would then not sample exp(-U): remove the hook before the fit. {FREEZE}"
            )
    for name, parameter in named_trainable(model).items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            kind = "of register_post_accumulate_grad_hook, which may change"
        elif any(_changes(hook, parameter) for hook in (parameter._backward_hooks or {}).values()):
            kind = "(register_hook) that changes"
        else:
            continue
        raise ValueError(
            f"'{name}' has a hook {kind} its gradient, so the chain would not sample exp(-U), and entries that it "
            f"masks would move by noise and prior: remove the hook before the fit. {FREEZE}"
        )


FREEZE = (
    "To keep a tensor at its value call requires_grad_(False); to keep a part of one, hold that part in a buffer and "
    "the rest in a parameter, and join them in forward"
)


def _changes(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    """Return whether a hook changes a made-up gradient, of both signs and many sizes."""
    ramp = torch.linspace(-1e4, 1e4, parameter.numel() + parameter.numel() % 2).to(parameter)
    gradient = ramp[: parameter.numel()].reshape(parameter.shape)
    given = gradient.clone()
    found = hook(given)
    return not torch.equal(given, gradient) or (found is not None and not torch.equal(found, gradient))


# -- looks at passes ---------------------------------------------------------------------------------------------------


LOGS = ("log", "log_dict")


def _ignore(*_: Any, **__: Any) -> None: ...


@contextmanager
def unlogged(model: nn.Module) -> Iterator[None]:
    """Within the context what a model logs is dropped, since its step logs it."""
    own = vars(model)
    kept = {name: own.pop(name) for name in LOGS if name in own}
    own.update(dict.fromkeys(LOGS, _ignore))
    try:
        yield
    finally:
        for name in LOGS:
            del own[name]
        own.update(kept)


# -- the forward pass --------------------------------------------------------------------------------------------------

LARGE = 2**22
"""Numbers of a network from which on its parameters are not copied to look at it."""
PLAIN = (bool, int, float, str)
REGISTERED = ("_parameters", "_buffers", "_modules")


class ForwardPasses:
    """Looks at forward passes in training mode, of one chain: whether they depend on the model's tensors alone.

    Args:
        are_rows: whether the energies are a function of the parameters as rows.
    """

    def __init__(self, model: EnergyModel, chains: StackedChains | None, are_rows: bool) -> None:
        self._model, self._chains, self._are_rows = model, chains, are_rows
        self._call = StatelessCall(model, type(model).log_likelihood)
        self._seen = 0
        self.change_inputs = False
        """Whether the network has changed its inputs in place."""

    def look(self, batch: Any) -> None:
        """Look at the pass of a batch of the first chain, and leave the model as it is.

        Raises:
            ValueError: if it uses a parameter by another way than its name, writes to one, or depends on a plain
                attribute that it sets; or if several chains are to compute activations again in the backward pass.
        """
        model, chains = self._model, self._chains
        self._seen += 1
        if model._compiled_net or (self._seen > 1 and self._is_large):
            return
        here = nullcontext() if chains is None else chains.at(0)
        with here, unlogged(model), unchanged_generators([model.device]), torch.enable_grad():
            attributes = _Attributes(model)
            try:
                fault = self._fault(batch, attributes)
            finally:
                attributes.set_back()
                torch.clear_autocast_cache()
        if fault is not None:
            raise ValueError(fault)

    @property
    def _is_large(self) -> bool:
        return sum(tensor.numel() for tensor in named_trainable(self._model).values()) >= LARGE

    def _fault(self, batch: Any, attributes: "_Attributes") -> str | None:
        """Return on what else a pass depends, and what to do about it; None for nothing."""
        try:
            with _Hooks() as hooks:
                each, passed = self._made(batch)
        except UnfinishedBufferError:
            raise
        except Exception:  # the step raises it too, or the model cannot be called so
            return None
        own = state_of(self._model)
        if (fault := self._fault_of_graph(each, passed, own)) is not None:
            return fault
        for name, tensor in passed.items():
            if own[name].requires_grad and not torch.equal(tensor.nan_to_num(), own[name].nan_to_num()):
                return (
                    f"each forward pass writes to '{name}', which the sampler does not know: leave the parameter as it "
                    "is, and use what is computed of it (torch.nn.utils.parametrize does so), or freeze it"
                )
        if any(_is_known_to_change(hook, tensor) for tensor, hook in hooks.registered):
            return (
                "forward registers a hook (register_hook) that changes a gradient, so the chain would not sample "
                "exp(-U): leave it out"
            )
        changed = attributes.changed()
        if not changed:
            return None
        second, _ = self._made(batch)
        attributes.set_back()
        again, _ = self._made(batch)
        if not _alike(each, again) or _alike(each, second):
            return None
        return (
            f"the network's output depends on {changed[0]}, which each forward pass changes, and which chains and "
            "samples do not have: make it a buffer (self.register_buffer), of which each has its own"
        )

    def _made(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return log p(y|x,θ) of each datum, and the tensors that were passed."""
        large, passed = self._is_large, dict[str, Tensor]()
        for name, tensor in state_of(self._model).items():
            if not tensor.requires_grad:
                passed[name] = tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
            else:
                passed[name] = nn.Parameter(tensor.detach() if large else tensor.detach().clone())
        given = cloned(batch)
        with unchanged_generators([self._model.device]):
            each = self._call.call(passed, given)
        self.change_inputs |= not same_numbers(given, batch)
        return each, passed

    def _fault_of_graph(self, each: Tensor, passed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
        """Return what in a result's graph makes its gradient another one than the passed tensors'; None for nothing."""
        known = {id(tensor) for tensor in passed.values()}
        names = {id(tensor): name for name, tensor in own.items()}
        if self._chains is not None:
            names |= self._chains.replaced()
        unused, hides_some = {id(passed[name]): name for name, t in own.items() if t.requires_grad}, False
        for node in _graph_of(each):
            hides_some |= node.name() == "CheckpointFunctionBackward"
            if node.name() == "CheckpointFunctionBackward" and self._chains is not None:
                return computed_again(self._chains.num_chains)
            if node.name() == "CheckpointFunctionBackward" and self._are_rows:
                return (
                    "the network computes activations again in the backward pass, in torch.utils.checkpoint's "
                    "reentrant form, which loses gradients here: pass use_reentrant=False"
                )
            if getattr(node, "_saved_scale_grad_by_freq", False):
                return (
                    "an embedding has scale_grad_by_freq=True, so its gradients are not those of the potential energy: "
                    "leave it out"
                )
            if getattr(node, "_saved_sparse", False) and self._are_rows:
                return "an embedding has sparse=True, and gradients here are dense, as the prior's is: leave it out"
            leaf = getattr(node, "variable", None)
            unused.pop(id(leaf), None)
            if isinstance(leaf, nn.Parameter) and (fault := fault_of_parameter(leaf, known, names)):
                return fault
        if unused and self._seen == 1 and not hides_some:
            _warn_of_unused(list(unused.values()), len(named_trainable(self._model)))
        return None


def _warn_of_unused(names: list[str], total: int) -> None:
    """Warn of parameters that the likelihood of the first batch does not depend on."""
    some = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
    rank_zero_warn(
        f"The likelihood of the first batch has no gradient in {len(names)} of {total} sampled tensors ({some}). "
        "Unless later batches use them, their samples are the prior's: take torch.no_grad() or detach() out of "
        "forward if they compute the output, or freeze them by requires_grad_(False)."
    )


def _graph_of(tensor: Tensor) -> Iterator[Any]:
    """Yield the nodes of a tensor's graph, each once."""
    waiting, met = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


def _is_known_to_change(hook: Callable[[Tensor], Tensor | None], activation: Tensor) -> bool:
    try:
        return _changes(hook, activation)
    except Exception:  # it is for the gradients of a backward pass
        return False


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


class _Hooks(TorchFunctionMode):
    """Notes the hooks that are registered for gradients of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[tuple[Tensor, Callable[[Tensor], Tensor | None]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self.registered.append(args)
        return func(*args, **kwargs or {})


class _Attributes:
    """The plain attributes of a module's parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (name, part, {key: value for key, value in vars(part).items() if key not in REGISTERED})
            for name, part in module.named_modules()
        ]
        self._numbers = [
            (name, key, value, value.detach().clone())
            for name, _, held in self._before
            for key, value in held.items()
            if type(value) is Tensor and value.numel() <= LARGE and not is_functorch_wrapped_tensor(value)
        ]

    def changed(self) -> list[str]:
        """Return the names of attributes that have been set to something else, or written to."""
        set_anew = [
            f"'{name}.{key}'" if name else f"'{key}'"
            for name, part, held in self._before
            for key, value in vars(part).items()
            if key not in REGISTERED and (key not in held or _differs(held[key], value))
        ]
        written = [
            f"'{name}.{key}'" if name else f"'{key}'"
            for name, key, value, numbers in self._numbers
            if not torch.equal(value, numbers)
        ]
        return set_anew + written

    def set_back(self) -> None:
        """Give the attributes their values again."""
        for _, part, held in self._before:
            now = vars(part)
            for key in [key for key in now if key not in held and key not in REGISTERED]:
                del now[key]
            now.update(held)
        with torch.no_grad():
            for _, _, value, numbers in self._numbers:
                if not torch.equal(value, numbers):
                    value.copy_(numbers)


def _differs(before: Any, now: Any) -> bool:
    return now is not before and not (isinstance(now, PLAIN) and type(now) is type(before) and now == before)


# -- activation checkpointing -----------------------------------------------------------------------------------------


@contextmanager
def explained(num_chains: int) -> Iterator[None]:
    """Within the context an error of layers that run again in the backward pass says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        file = checkpoint.__file__
        passed = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
        if num_chains == 1 or file not in passed:
            raise
        raise RuntimeError(computed_again(num_chains)) from error


def computed_again(num_chains: int) -> str:
    return (
        "the network computes activations again in the backward pass (torch.utils.checkpoint), where its layers hold "
        f"all {num_chains} chains: switch activation checkpointing off, or run one chain in each process "
        "(num_chains=1 and Trainer(strategy='chains'))"
    )
