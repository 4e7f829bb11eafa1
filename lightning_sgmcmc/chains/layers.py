"""Layers that cannot be sampled as they are, and layers whose gradients are wrong or fail where chains run together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import checkpoint


def prepare_layers(model: nn.Module) -> None:
    """Raise for layers that cannot be sampled, and let embeddings have dense gradients.

    The prior's gradient is dense, so sparse ones save nothing, and they cannot be computed for chains together.

    Args:
        model: the model; which parameters require gradients is known.

    Raises:
        ValueError: for a scripted layer, a sparse buffer, or a sampled embedding that changes its weights in `forward`
            or whose gradients are not those of the energy.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"'{name}' is scripted by torch.jit, so its parameters cannot be replaced by a sample's: pass the "
                "module that was scripted"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.weight.requires_grad:
            _check_embedding(name, part)
            part.sparse = False
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"the buffer '{name}' is a sparse tensor, which samples cannot hold: register it dense, or keep "
                "it in a plain attribute"
            )


def _check_embedding(name: str, part: nn.Embedding | nn.EmbeddingBag) -> None:
    if part.max_norm is not None:
        raise ValueError(
            f"'{name}' has max_norm={part.max_norm:g}, so each forward pass rescales rows of the weights, which the "
            "sampler does not know: omit max_norm (the prior bounds the weights), or freeze the layer"
        )
    if part.scale_grad_by_freq:
        raise ValueError(
            f"'{name}' has scale_grad_by_freq=True, so its gradients are not those of the potential energy: pass "
            "scale_grad_by_freq=False, or freeze the layer"
        )


# -- hooks that change gradients --------------------------------------------------------------------------------------


def check_hooks(model: nn.Module) -> None:
    """Raise if a hook changes the gradient of something that is sampled.

    The chain would follow another force than that of U, and a masked entry would not stay: it has noise and a prior. A
    hook of a tensor is called here with a made-up gradient; one that returns None or what it got is accepted.

    Args:
        model: the model.

    Raises:
        ValueError: with the tensor or layer, and the remedy.
    """
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ValueError(
                f"'{name or type(model).__name__}' has a backward hook, which may change gradients, and the chain "
                f"would then not sample exp(-U): remove the hook before the fit. {FREEZE}"
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"'{name}' has a hook of register_post_accumulate_grad_hook, which may change its gradient, and the "
                f"chain would then not sample exp(-U): remove the hook before the fit. {FREEZE}"
            )
        if any(_changes(hook, parameter) for hook in (parameter._backward_hooks or {}).values()):
            raise ValueError(
                f"'{name}' has a hook (register_hook) that changes its gradient, so the chain would not sample "
                f"exp(-U), and entries that it masks would move by noise and prior: remove the hook. {FREEZE}"
            )


FREEZE = (
    "To keep a tensor at its value call requires_grad_(False); to keep a part of one, hold that part in a buffer and "
    "the rest in a parameter, and join them in forward"
)


def _changes(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    """Return whether a hook changes a gradient of both signs and many sizes."""
    ramp = torch.linspace(-1e4, 1e4, parameter.numel() + parameter.numel() % 2).to(parameter)
    gradient = ramp[: parameter.numel()].reshape(parameter.shape)
    given = gradient.clone()
    found = hook(given)
    return not torch.equal(given, gradient) or (found is not None and not torch.equal(found, gradient))


# -- embeddings with a padding row ------------------------------------------------------------------------------------


def mask_padding(model: nn.Module) -> None:
    """Let no gradient pass through the outputs of embeddings at `padding_idx`, for good.

    The padding row has no gradient of the likelihood. Under `torch.vmap` torch masks that row of the first chain only.

    Args:
        model: the model.
    """
    padded = (part for part in model.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None)
    for part in padded:
        if _without_padding not in part._forward_hooks.values():
            part.register_forward_hook(_without_padding, with_kwargs=True)


def _without_padding(
    layer: nn.Embedding, arguments: tuple[Tensor, ...], named: Mapping[str, Tensor], output: Tensor
) -> Tensor:
    indices = arguments[0] if arguments else named["input"]
    assert layer.padding_idx is not None
    return torch.where(indices.eq(layer.padding_idx)[..., None], output.detach(), output)


# -- activation checkpointing -----------------------------------------------------------------------------------------


@contextmanager
def explained(num_chains: int) -> Iterator[None]:
    """Within the context an error of layers that run again in the backward pass says what to do.

    Args:
        num_chains: C.

    Raises:
        RuntimeError: in place of an error that was raised while activations were computed again.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if num_chains == 1 or not _passes(error, checkpoint.checkpoint):
            raise
        raise RuntimeError(
            f"the network computes activations again in the backward pass (torch.utils.checkpoint), where its layers "
            f"hold all {num_chains} chains: switch activation checkpointing off, or run one chain in each process "
            "(num_chains=1 and Trainer(strategy='chains'))"
        ) from error


def _passes(error: BaseException, function: Callable[..., object]) -> bool:
    """Return whether an error was raised in a call that passes the file of a function."""
    trace, file = error.__traceback__, function.__code__.co_filename
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            return True
        trace = trace.tb_next
    return False
