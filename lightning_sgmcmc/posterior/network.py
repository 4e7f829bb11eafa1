"""The model that a store describes."""

from typing import Any

import torch
from torch import nn

from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.checks import check_fits
from lightning_sgmcmc.posterior.classes import NotDescribableError
from lightning_sgmcmc.posterior.description import build
from lightning_sgmcmc.posterior.disk import DiskStore


def model_of(store: DiskStore, net: nn.Module | None = None, trust: bool = False) -> tuple[EnergyModel | None, str]:
    """Return the model that a store describes, or None and the reason.

    Args:
        store: the samples.
        net: the network to use instead of the described one.
        trust: import any module that the description names.

    Raises:
        ValueError: if `net` is given, and it does not fit the samples or the description has no place for it.
    """
    description = store.model_description
    if description is None:
        if net is not None:
            raise ValueError(
                f"net={type(net).__name__}(…) is not enough: {store.path} does not describe the likelihood; pass "
                "model=BayesianModule(net=…, likelihood=…)"
            )
        return None, "the store has no description of its network"
    try:
        if net is None:
            _check_outline(store, trust)
        with torch.random.fork_rng(devices=[]):  # its initial weights are not used
            model = _model(description, net, trust)
    except ValueError as error:
        if net is not None:
            raise ValueError(f"net={type(net).__name__}(…) cannot be used: {error}{store.written_by_newer}") from error
        return None, f"{error}{store.written_by_newer}"
    if net is not None and len(store) > 0 and not store.skips_damaged:
        check_fits(store[0], model)
    return model, ""


def _check_outline(store: DiskStore, trust: bool) -> None:
    """Raise ValueError unless the described network fits a sample; nothing of its size is allocated.

    A damaged description may have layers of any size.
    """
    with torch.device("meta"):
        model = _model(store.model_description, None, trust)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    odd: set[str] = set()
    for index in range(len(store)):
        try:
            common = {name: shape for name, shape in store.shared_shapes().items() if name in expected}
            found = store.shapes(index) | common
        except ValueError:
            continue  # damaged; the next one decides
        if found == expected:
            return
        odd = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
    if len(store) == 0:
        raise NotDescribableError("the store has no sample to compare its description with")
    raise NotDescribableError(
        f"its description is of another network than its samples: '{min(odd)}' differs"
        if odd
        else "none of its samples can be read"
    )


def _model(description: Any, net: nn.Module | None, trust: bool) -> EnergyModel:
    model = build(description, net, trust)
    if not isinstance(model, EnergyModel):
        raise NotDescribableError(f"the store describes a {type(model).__name__}, which is not a BayesianModule")
    return model
