"""The inputs of the sampled part of a network, computed once for all data."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_sgmcmc.batches.inputs import Features, leaves_of
from lightning_sgmcmc.batches.loader import ResumableLoader, flat_loaders, is_shuffled
from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.chains.starts import LIKELIHOOD, frozen_parts
from lightning_sgmcmc.checks import check_number
from lightning_sgmcmc.datamodules import ArrayDataModule, DatasetDataModule, Split, StreamDataModule
from lightning_sgmcmc.evaluation.scoring import HOOKS, is_overridden
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.model import named_trainable
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import fabric, pl, rank_zero_info
from lightning_sgmcmc.seeding import unchanged_generators
from lightning_sgmcmc.tables import InputColumns

move_data_to_device = fabric.utilities.move_data_to_device

CHUNK = 512
"""Data that pass through the frozen layers at once."""
TOLERANCE = 1e-4


class FeatureDataModule(ArrayDataModule):
    """Data as the inputs of the one sampled layer: the frozen layers before it compute them once.

    The fit then costs what a fit of the sampled layer alone costs. Its samples and its store are those of the whole
    network, so they predict from the data's own inputs. The features of all parts stay in the host's memory.

    Data come from any datamodule or loader: dicts, batches of transformers, torch data sets. The network is in
    evaluation mode, and each datum is read once, in the data set's order, also where a training loader shuffles or
    leaves out a short last batch. So N is the number of training data.

    Args:
        module: a module whose sampled parameters are all in one layer (or part), which computes the network's output.
        data: a datamodule or the loader of the training data, without augmentation.
        val: the loader of validation data, if `data` is a loader.
        test: the loader of test data, likewise.
        batch_size: features per batch; None takes that of `data`.
        max_gb: the most memory that features may take, in GB.

    Raises:
        TypeError: if `data` is neither a datamodule nor a loader, or a target is no tensor.
        ValueError: if there is no batch size; at setup, if the data are augmented, drawn with weights or repetition, or
            take more than `max_gb`, if the sampled parameters are in several parts, the network does more with the
            part's output, or the part's inputs are others in training than in evaluation, as by dropout.

    Example::

        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))  # trained before
        module = bayesianize(net, "last_layer", Categorical(), num_chains=4)
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.randn(60, 2), torch.arange(60) % 3), batch_size=16, shuffle=True)
        features = FeatureDataModule(module, loader)  # and trainer.fit(module, datamodule=features)
        # then module.posterior.predict(x) of the data's own inputs
    """

    def __init__(
        self,
        module: BayesianModule,
        data: Any,
        val: Any = None,
        test: Any = None,
        batch_size: int | None = None,
        max_gb: float = 8.0,
    ) -> None:
        of_datamodule = isinstance(data, pl.LightningDataModule)
        if not of_datamodule and (isinstance(data, Tensor | Mapping | str | tuple) or not isinstance(data, Iterable)):
            raise TypeError(
                f"data should be a datamodule or a loader of training data, got a {type(data).__name__}: pass "
                "TableDataModule(x, y) for arrays, DatasetDataModule(data) for a data set"
            )
        if of_datamodule and (val is not None or test is not None):
            raise ValueError("val and test are for loaders, and data is a datamodule with its own: leave them out")
        if isinstance(data, StreamDataModule):
            raise TypeError(
                "data of a StreamDataModule arrive during the run, so nothing is computed once: fit without"
            )
        hooks = [name for name in HOOKS if is_overridden(name, module)]
        if hooks:
            raise ValueError(
                f"{type(module).__name__}.{hooks[0]} changes batches, and would get features in the fit: move it to a "
                "datamodule, or into the network"
            )
        check_number("max_gb", max_gb, optional=False)
        known = getattr(data, "batch_size", None) or getattr(getattr(data, "hparams", None), "batch_size", None)
        size = known if batch_size is None else batch_size
        if size is None:
            raise ValueError(f"{type(data).__name__} does not say its batch_size: pass batch_size=…")
        ours = isinstance(data, ArrayDataModule | DatasetDataModule)
        options = {"order": data.order, "drop_last": data.drop_last} if ours else {}
        super().__init__(size, seed=getattr(data, "seed", 0) if isinstance(data, ArrayDataModule) else 0, **options)
        self._module = [module]  # not a part of this object that Lightning would move
        self.data = data
        self.max_gb = max_gb
        self._loaders = (data, val, test)

    def prepare_data(self) -> None:
        if isinstance(self.data, pl.LightningDataModule):
            self.data.prepare_data()

    def load(self) -> tuple[Split, Split, Split]:
        data, (module,) = self.data, self._module
        loaders = self._loaders_of_data()
        for name in ("num_classes", "target_mean", "target_std", "task", "task_is_said", "classes"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))
        if self.trainer is not None:
            module.to(self.trainer.strategy.root_device)
        if module.chains.stacked is None:
            module.chains.sharing.begin()
        trunk = Trunk(module, sampled_part(module), self.max_gb)
        with module.at_chain(0), evaluation_mode(module), torch.no_grad(), unchanged_generators([module.device]):
            if loaders is None:
                transform = data.transform()
                parts = [trunk.features(_chunks(part, transform, module.device)) for part in data.splits]
            else:
                parts = [trunk.features(self._on_device(loader)) for loader in loaders]
        if len(parts[0].targets) == 0:
            raise ValueError(f"{type(data).__name__} has no training data")
        module.features_into = trunk.name
        size = sum(part.inputs.nbytes for part in parts)
        rank_zero_info(
            f"Features of {trunk.name!r}: {megabytes(size)} for {sum(len(p.targets) for p in parts):,} data."
        )
        return parts[0], parts[1], parts[2]

    def _loaders_of_data(self) -> tuple[Any, Any, Any] | None:
        """Return loaders of the three parts, each in its data's order; None for arrays in memory."""
        data = self.data
        if not isinstance(data, pl.LightningDataModule):
            return in_order(data, "data", True), in_order(self._loaders[1], "val"), in_order(self._loaders[2], "test")
        if self.trainer is not None and getattr(data, "trainer", None) is None:
            data.trainer = self.trainer
        data.setup("fit")
        name = type(data).__name__
        if isinstance(data, ArrayDataModule):
            training = data.train_transform()
            if training is not data.transform() and getattr(training, "augments", True):
                raise ValueError(_augments(name))
            return None
        train, val = in_order(data.train_dataloader(), name, True), in_order(_loader_of(data, "val"), name)
        data.setup("test")
        return train, val, in_order(_loader_of(data, "test"), name)

    def _on_device(self, loader: Any) -> Iterator[Any]:
        """Yield a loader's batches on the module's device, by the datamodule's own hooks if it has some."""
        (module,) = self._module
        for number, batch in enumerate(loader):
            again = copy.deepcopy(batch) if number == 0 else None  # hooks may change a batch in place
            moved = self._moved(batch)
            if again is not None and not _are_alike(moved, self._moved(again)):
                raise ValueError(_augments(type(self.data).__name__))
            yield module.used_of(moved)

    def _moved(self, batch: Any) -> Any:
        data, (module,) = self.data, self._module
        if not isinstance(data, pl.LightningDataModule):
            return move_data_to_device(batch, module.device)
        moved = data.transfer_batch_to_device(data.on_before_batch_transfer(batch, 0), module.device, 0)
        return data.on_after_batch_transfer(moved, 0)

    @property
    def input_columns(self) -> InputColumns | None:
        """What the data's own inputs are, from which the samples' whole networks predict."""
        columns = getattr(self.data, "input_columns", None)
        return columns if isinstance(columns, InputColumns) else None

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


class Trunk:
    """Computes the inputs of a module's part `name`."""

    def __init__(self, module: BayesianModule, name: str, max_gb: float) -> None:
        self.module, self.name = module, name
        self._layer: nn.Module = module.get_submodule(name)
        self._room, self._max_gb = max_gb * 1e9, max_gb
        self._is_checked = False
        module.chains.sharing.set_evaluating()
        self._modes = [(part, part.training) for part in module.modules()]  # those of a fit
        module.chains.sharing.set_back()

    def features(self, batches: Iterable[Any]) -> Split:
        """Return the features and the targets of batches, in their order."""
        seen: list[Any] = []
        handle = self._layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
        found: list[tuple[Tensor, Tensor]] = []
        try:
            for batch in batches:
                seen.clear()
                output, target = self.module.output_and_target(batch)
                calls = list(seen)
                if not self._is_checked:
                    _check_output(self.name, self._layer, calls, output)
                    self._check_training(batch, seen, calls[0][0])
                    self._is_checked = True
                found.append((calls[0][0].cpu(), self._target(target, len(calls[0][0]))))
                self._take(found)
        finally:
            handle.remove()
        if not found:
            return Split(torch.empty(0), torch.empty(0))
        shapes = {tuple(inputs.shape[1:]) for inputs, _ in found}
        if len(shapes) > 1:
            raise ValueError(
                f"the features of batches have the shapes {', '.join(map(str, sorted(shapes)))}, and one array needs "
                "one: pad all data to one length (padding='max_length')"
            )
        return Split(torch.cat([inputs for inputs, _ in found]), torch.cat([target for _, target in found]))

    def _check_training(self, batch: Any, seen: list[Any], features: Tensor) -> None:
        """Raise if the part's inputs are others in the steps of a fit, as by dropout that is no layer."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        before = [(part, part.training) for part in self.module.modules()]
        seen.clear()
        try:
            for part, training in self._modes:
                part.training = training
            self.module.output_and_target(batch)
        finally:
            for part, training in before:
                part.training = training
            for buffer, value in buffers:
                buffer.copy_(value)
        same = len(seen) == 1 and seen[0][0].shape == features.shape
        if not same or not torch.allclose(seen[0][0], features, TOLERANCE, TOLERANCE, equal_nan=True):
            raise ValueError(
                f"the inputs of '{self.name}' are others in training than in evaluation, as by dropout in forward, "
                "stochastic depth or a BatchNorm without weights before it, so features would be of another network: "
                "switch that off in training, such as net.norm.eval(), or fit without FeatureDataModule"
            )

    def _target(self, target: Any, count: int) -> Tensor:
        if not isinstance(target, Tensor) or target.dim() == 0 or len(target) != count:
            what = f"shape {tuple(target.shape)}" if isinstance(target, Tensor) else f"a {type(target).__name__}"
            raise TypeError(f"the target of {count} features should be a tensor of as many rows, got {what}")
        return target.cpu()

    def _take(self, found: list[tuple[Tensor, Tensor]]) -> None:
        self._room -= found[-1][0].nbytes
        if self._room < 0:
            count, each = sum(len(one) for one, _ in found), found[-1][0][:1].nbytes
            raise ValueError(
                f"the features of the first {count:,} data take more than max_gb={self._max_gb:g}, {each / 1e3:.3g} kB "
                "each: pass a larger max_gb if the memory holds all, or fit without FeatureDataModule"
            )


def _check_output(name: str, layer: nn.Module, calls: list[Any], output: Tensor) -> None:
    suits = len(calls) == 1 and len(calls[0]) == 1 and isinstance(calls[0][0], Tensor)
    alone = layer(*calls[0]) if suits else None
    if alone is None or alone.shape != output.shape or not torch.allclose(alone, output, TOLERANCE, TOLERANCE):
        raise ValueError(
            f"the network's output is not that of its sampled part '{name}' for one input of it, so features are not "
            "enough to compute it: fit without FeatureDataModule"
        )


# -- loaders -----------------------------------------------------------------------------------------------------------


def _chunks(
    part: Split, transform: Callable[[Tensor], Tensor] | None, device: torch.device
) -> Iterator[tuple[Any, Tensor]]:
    """Yield batches of a part in memory, the inputs on a device."""
    if len(part.targets):
        for x, y in zip(part.inputs.split(CHUNK), part.targets.split(CHUNK), strict=True):
            yield x.to(device) if transform is None else transform(x.to(device)), y


def _augments(name: str) -> str:
    return (
        f"{name} augments its training data, so features would be of other inputs at each step: pass one without "
        "augmentation, or fit without FeatureDataModule"
    )


def _loader_of(data: pl.LightningDataModule, part: str) -> Any:
    name = f"{part}_dataloader"
    return getattr(data, name)() if getattr(type(data), name) is not getattr(pl.LightningDataModule, name) else None


def in_order(loader: Any, name: str, is_training: bool = False) -> Any:
    """Return a loader of all data of a loader, each once and in the data set's order where it is known to have one."""
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return ()
    found = loader
    if isinstance(loader, Mapping | list | tuple):
        inner = [one for one in flat_loaders(loader) if isinstance(one, DataLoader | ResumableLoader)]
        if len(inner) > 1:
            raise ValueError(
                f"{name} has {len(inner)} loaders of one part: pass one, FeatureDataModule(module, loader)"
            )
        found = inner[0] if inner else loader
    if isinstance(found, DataLoader) and isinstance(found.dataset, IterableDataset):
        return found
    if isinstance(found, DataLoader | ResumableLoader):
        found = _sequential(found, name)
    if is_training and not isinstance(found, Iterator) and not _reads_alike(found):
        raise ValueError(_augments(name))
    return found


def _sequential(loader: Any, name: str) -> Any:
    sampler = getattr(loader, "sampler", None)
    if isinstance(loader, DataLoader):
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            return loader  # its own batches
        repeats = isinstance(sampler, RandomSampler) and (
            sampler.replacement or len(sampler) != len(sampler.data_source)
        )
        if repeats or not isinstance(sampler, RandomSampler | SequentialSampler):
            if not is_shuffled(loader):
                return loader
            raise ValueError(
                f"{name} draws its data by a {type(sampler).__name__}, which repeats or leaves out some: pass "
                "DataLoader(dataset, batch_size), of torch.utils.data.Subset(dataset, indices) for a part of it"
            )
    options = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    return DataLoader(loader.dataset, batch_size=loader.batch_size, **options)


def _reads_alike(loader: Any) -> bool:
    """Return whether the first batch is the same in two passes."""
    with unchanged_generators([]):
        return _are_alike(*(next(iter(loader), None) for _ in range(2)))


def _are_alike(first: Any, again: Any) -> bool:
    """Return whether two batches have the same tensors; NaN, a target that is missing, is equal to itself."""
    pairs = zip(leaves_of(first), leaves_of(again), strict=False)
    tensors = [(one, other) for one, other in pairs if isinstance(one, Tensor) and isinstance(other, Tensor)]
    return all(
        one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in tensors
    )
