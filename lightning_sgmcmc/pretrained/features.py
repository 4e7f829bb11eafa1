"""The inputs of the sampled part of a network, computed once for all data."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_sgmcmc.batches.inputs import Features
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.chains.starts import LIKELIHOOD, frozen_parts
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.model import named_trainable
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import rank_zero_info
from lightning_sgmcmc.tables import InputColumns

CHUNK = 512
"""Data that pass through the frozen layers at once."""
TOLERANCE = 1e-4


class FeatureDataModule(ArrayDataModule):
    """A datamodule's data as the inputs of the one sampled layer: the frozen layers before it compute them once.

    The fit then costs what a fit of the sampled layer alone costs. Its samples and its store are those of the whole
    network, so they predict from the data's own inputs.

    Args:
        module: a module whose sampled parameters are all in one layer (or part), which computes the network's output.
        data: its data in memory, without augmentation.

    Raises:
        TypeError: if `data` is no `ArrayDataModule`.
        ValueError: at setup, if the data are augmented, the sampled parameters are in several parts, the network does
            more with the part's output, or parts before it drop out.

    Example::

        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))  # trained before
        module = bayesianize(net, "last_layer", Categorical(), num_chains=4)
        from lightning_sgmcmc.datamodules import TableDataModule

        data = TableDataModule(torch.randn(60, 2), torch.arange(60) % 3, batch_size=20)
        features = FeatureDataModule(module, data)  # and trainer.fit(module, datamodule=features)
        # then module.posterior.predict(x) of the data's own inputs
    """

    def __init__(self, module: BayesianModule, data: ArrayDataModule) -> None:
        if not isinstance(data, ArrayDataModule):
            raise TypeError(
                f"data should be a datamodule with data in memory, got {type(data).__name__}: pass a TableDataModule, "
                "an image datamodule, or another ArrayDataModule"
            )
        super().__init__(data.batch_size, data.drop_last, data.seed)
        self._module = [module]  # not a part of this object that Lightning would move
        self.data = data
        self.order = data.order

    def prepare_data(self) -> None:
        self.data.prepare_data()

    def load(self) -> tuple[Split, Split, Split]:
        data, (module,) = self.data, self._module
        data.setup("fit")
        self.num_classes, self.target_mean, self.target_std = data.num_classes, data.target_mean, data.target_std
        self.task, self.task_is_said = data.task, data.task_is_said
        transform = data.transform()
        if data.train_transform() is not transform:
            raise ValueError(
                f"{type(data).__name__} augments its training data, so features would be of other inputs at each step: "
                "pass one without augmentation, or fit without FeatureDataModule"
            )
        if self.trainer is not None:
            module.to(self.trainer.strategy.root_device)
        if module.chains.stacked is None:
            module.chains.sharing.begin()
        name = sampled_part(module)
        with module.at_chain(0), evaluation_mode(module), torch.no_grad():
            parts = [_features(module, name, part, transform) for part in data.splits]
        module.features_into = name
        size = sum(part.inputs.nbytes for part in parts)
        rank_zero_info(f"Features of {name!r}: {megabytes(size)} for {sum(len(p.targets) for p in parts):,} data.")
        return parts[0], parts[1], parts[2]

    @property
    def input_columns(self) -> InputColumns | None:
        """What the data's own inputs are, from which the samples' whole networks predict."""
        return self.data.input_columns

    def transform(self) -> Callable[[Tensor], Any]:
        return Features


def sampled_part(module: BayesianModule) -> str:
    """Return the name of the smallest part of a module that has all sampled parameters of its network."""
    names = [name.split(".")[:-1] for name in named_trainable(module) if not name.startswith(LIKELIHOOD)]
    together = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    part = ".".join(parts[0] for parts in together)
    if part in ("", "net"):
        raise ValueError("the sampled parameters are in several parts of the network, so nothing is computed once")
    frozen = tuple(f"{name}." for name, _ in frozen_parts(module))
    for name, layer in module.named_modules():
        drops = isinstance(layer, _DropoutNd) and layer.p > 0 and not name.startswith(f"{part}.")
        if drops and (module.chains.sharing.dropout or not name.startswith(frozen)):
            raise ValueError(
                f"'{name}' drops out in training, so features would be of another network at each step: set its p to 0"
            )
    return part


def _features(module: BayesianModule, name: str, part: Split, transform: Callable[[Tensor], Tensor] | None) -> Split:
    """Return a part of the data with the inputs of the module's part `name` instead of its own."""
    seen: list[Any] = []
    layer: nn.Module = module.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    found: list[Tensor] = []
    try:
        for x in part.inputs.split(CHUNK) if len(part.targets) else ():
            seen.clear()
            output = module.output_of(x.to(module.device) if transform is None else transform(x.to(module.device)))
            calls = list(seen)
            if not found:
                _check_output(name, layer, calls, output)
            found.append(calls[0][0].cpu())
    finally:
        handle.remove()
    return Split(torch.cat(found) if found else torch.empty(0), part.targets)


def _check_output(name: str, layer: nn.Module, calls: list[Any], output: Tensor) -> None:
    suits = len(calls) == 1 and len(calls[0]) == 1 and isinstance(calls[0][0], Tensor)
    alone = layer(*calls[0]) if suits else None
    if alone is None or alone.shape != output.shape or not torch.allclose(alone, output, TOLERANCE, TOLERANCE):
        raise ValueError(
            f"the network's output is not that of its sampled part '{name}' for one input of it, so features are not "
            "enough to compute it: fit without FeatureDataModule"
        )
