"""A module and its data as what chains of Hamiltonian Monte Carlo need: energies, starts, samples."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from lightning_sgmcmc.batches.rows import rows_of
from lightning_sgmcmc.chains.densities import Densities, vmap_refusal
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.chains.layers import check_hooks
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.starts import ChainStart, check_start, start_chain
from lightning_sgmcmc.chains.weights import check_batch
from lightning_sgmcmc.datamodules.base import TensorBatches, evaluation_loader
from lightning_sgmcmc.evaluation.passes import differs_in_training, indices_of, plain_data
from lightning_sgmcmc.evaluation.scoring import through_hooks
from lightning_sgmcmc.expansion import collapsed
from lightning_sgmcmc.model import EnergyModel, check_model, check_shape, named_trainable, of_prior
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.hierarchical import VARIANCE
from lightning_sgmcmc.priors.state import (
    Entries,
    held_rows,
    is_prior_state,
    prior_state,
    sampled_columns,
    with_row,
    without_row,
)
from lightning_sgmcmc.samplers.rows import FlatParameters
from lightning_sgmcmc.seeding import derive_seed, unchanged_generators
from lightning_sgmcmc.tables import Columns
from lightning_sgmcmc.tensors import copied, widest, widest_dtype


def all_batches(model: EnergyModel, data: Any, batch_size: int) -> list[Any]:
    """Return all training data in the data set's order, on the model's device and in its dtype, not augmented."""
    datamodule = data if isinstance(data, pl.LightningDataModule) else None
    with unchanged_generators([model.device]):
        loader = _loader(data, batch_size)
        batches = [_moved(batch, model, datamodule) for batch in loader]
    if not batches:
        raise ValueError("the data set is empty: a posterior needs data")
    _check_numbers(batches)
    return batches


def digest(values: Any) -> str:
    """Return a short hash of all tensors in nested lists, tuples and dictionaries."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().cpu().contiguous()
            found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _loader(data: Any, batch_size: int) -> Any:
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        return _in_order(loader, plain_data(data), batch_size)
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return evaluation_loader(TensorBatches(*data), batch_size)
    if isinstance(data, TensorBatches):
        return evaluation_loader(data, batch_size)
    if isinstance(data, Dataset):
        return _in_order(DataLoader(data), data, batch_size)
    if hasattr(data, "dataset"):
        return _in_order(data, None, batch_size)
    raise TypeError(
        f"data must be a pair of tensors (x, y), a data set, a loader or a datamodule, got {type(data).__name__}"
    )


def _in_order(loader: Any, dataset: Any, batch_size: int) -> Any:
    rows = rows_of(loader)
    if rows.dataset is None:
        raise ValueError(
            f"{type(loader).__name__} has no data set with a length, and every gradient is one of all data: pass a "
            "data set, a loader of one, or tensors (x, y)"
        )
    return rows.loader(range(len(indices_of(rows, "reference.sample"))), dataset, batch_size, passes=1)


def _moved(batch: Any, model: EnergyModel, datamodule: pl.LightningDataModule | None) -> Any:
    """Return a batch on the model's device, in its dtype, through the user's hooks."""
    batch = through_hooks(batch, model, datamodule)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def converted(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return model.used_of(pytree.tree_map(converted, batch))


def _check_numbers(batches: Sequence[Any]) -> None:
    for place, leaves in enumerate(zip(*map(pytree.tree_leaves, batches), strict=False)):
        numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        count = sum(int(leaf.isnan().sum()) for leaf in numbers)
        if count:
            raise ValueError(
                f"the training data hold {count} NaN in part {place} of a batch (0 is the first tensor), and no energy "
                "is finite with them: remove or impute these data"
            )


# -- energies ----------------------------------------------------------------------------------------------------------


PROBES = 32
"""Data whose log-likelihoods are traced, for R-hat and effective sample sizes of what the network predicts."""


class FullEnergy:
    """U/τ over all data and its gradient, computed in pieces, whose memory does not grow with the data.

    Energies are added up in double precision. The scales of a `HierarchicalPrior` are integrated out. Chains are
    computed one after another, each bit for bit as alone, or all at once by `torch.vmap`. `names` has the sampled
    parameters in the order of the columns, which are those of their sampled entries.
    """

    def __init__(
        self, model: EnergyModel, batches: Sequence[Any], temperature: float = 1.0, vmapped: bool = False
    ) -> None:
        named = named_trainable(model)
        self.names = list(named)
        self.temperature = temperature
        self._model = model
        self._batches = batches
        self._vmapped = vmapped
        self._densities = Densities(model, marginal=True)
        self._held = self._densities.held
        self._columns = sampled_columns(named, self._held)
        """The stretches of columns of all parameters that are sampled; the rest is a held row."""
        self._shapes = [without_row(t, self._held[n]).shape if n in self._held else t.shape for n, t in named.items()]
        self._flat = FlatParameters([list(named.values())], 1)
        if self._densities.has_own_prior and isinstance(model.prior, HierarchicalPrior):
            raise ValueError(
                f"{type(model).__name__} defines log_prior, so the scales of its HierarchicalPrior cannot be "
                "integrated out: pass another prior"
            )

    @property
    def present(self) -> Tensor:
        """The model's own sampled parameters as a row, shape (P,)."""
        return self._of_columns(self._flat.values[0])

    def _of_columns(self, everything: Tensor) -> Tensor:
        """Return a copy of the sampled columns, shape (P,), of those of all parameters."""
        return torch.cat([everything[part] for part in self._columns])

    def put(self, row: Tensor) -> None:
        """Set the model's sampled parameters, shape (P,)."""
        with torch.no_grad():
            values = self._flat.values[0]
            pieces = row.split([part.stop - part.start for part in self._columns])
            for part, piece in zip(self._columns, pieces, strict=True):
                values[part].copy_(piece)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return U/τ, shape (n,), float64, and its gradient, shape (n, P), at parameters of shape (n, P)."""
        with torch.enable_grad():
            if self._vmapped:
                return self._together(rows)
            found = [self._alone(row) for row in rows]
        energies, gradients = zip(*found, strict=True)
        return torch.stack(energies), torch.stack(gradients)

    def log_likelihoods(self, rows: Tensor) -> Tensor:
        """Return log p(y|x,θ) of up to `PROBES` data, evenly spread over the first piece, shape (n, M)."""
        found = []
        with torch.no_grad():
            for row in rows:
                self.put(row)
                each = self._model.log_likelihood(self._batches[0])
                found.append(each[torch.linspace(0, len(each) - 1, min(PROBES, len(each))).round().long()])
        return widest(torch.stack(found))

    def sampled(self, values: Tensor) -> dict[str, Tensor]:
        """Return rows, shape (n, P), by the parameters' names, each of shape (n, …) without its held row."""
        columns = values.split([shape.numel() for shape in self._shapes], 1)
        pieces = [column.reshape(-1, *shape) for column, shape in zip(columns, self._shapes, strict=True)]
        return dict(zip(self.names, pieces, strict=True))

    # -- one chain after another --------------------------------------------------------------------------------------

    def _alone(self, row: Tensor) -> tuple[Tensor, Tensor]:
        self.put(row)
        self._flat.gradients.zero_()
        self._flat.attach_gradients()
        total = row.new_zeros((), dtype=widest_dtype(row.device))
        for batch in self._batches:
            each = self._model.log_likelihood(batch)
            check_shape(each)
            total += self._backward(each.sum(dtype=widest_dtype(each.device)))
        total += self._backward(
            widest(self._densities.present_log_prior(named_trainable(self._model) | prior_state(self._model)))
        )
        return total, self._of_columns(self._flat.gradients[0])

    def _backward(self, log_density: Tensor) -> Tensor:
        part = log_density / -self.temperature
        if part.requires_grad:  # a flat prior is a constant
            part.sum().backward()
        return part.detach()

    # -- all at once --------------------------------------------------------------------------------------------------

    def _together(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        total = rows.new_zeros(len(rows), dtype=widest_dtype(rows.device))
        for batch in self._batches:
            try:
                state = self._complete(self.sampled(leaf))
                each = self._densities.log_likelihoods(state, batch, randomness="error")
            except RuntimeError as error:
                raise vmap_refusal(error, self._model) from error
            check_shape(each, chains=True)
            total += self._backward(each.sum(1, dtype=widest_dtype(each.device)))
        total += self._backward(widest(self._log_priors(self.sampled(leaf))))
        assert leaf.grad is not None
        return total, leaf.grad

    def _complete(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sampled entries by name, each of shape (n, …), with the held rows, which are the model's."""
        own, found = named_trainable(self._model) if self._held else {}, dict(named)
        for name, row in self._held.items():
            value = own[name].detach()[row]
            found[name] = with_row(named[name], row, value.expand(len(named[name]), *value.shape), 1)
        return found

    def _log_priors(self, named: dict[str, Tensor]) -> Tensor:
        count = len(next(iter(named.values())))
        state = {name: tensor.expand(count, *tensor.shape) for name, tensor in prior_state(self._model).items()}
        return self._densities.log_priors(self._complete(named), Entries({**named, **state}, self._held))


# -- problem -----------------------------------------------------------------------------------------------------------


class Problem:
    """The posterior of a copy of a module given its data, with U/τ and the chains' starts, shape (C, P)."""

    def __init__(
        self,
        module: BayesianModule,
        data: Any,
        batch_size: int,
        chains: int,
        start: "ChainStart | None",
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.model = _copied(module)
        self._seed = seed
        start = module.chains.start if start is None else start
        check_start(start)
        initial = _starts(self.model, start, chains, seed)
        own = initial.dtype if dtype is None else dtype
        if own not in (torch.float32, torch.float64):
            raise ValueError(f"chains need float32 or float64, and the module has {own}: pass dtype=torch.float64")
        self.model.to(own)
        self.initial = initial.to(own)
        batches = all_batches(self.model, data, batch_size)
        for batch in batches:
            check_batch(self.model, None, batch)
        with torch.no_grad():
            found = sum(len(self.model.log_likelihood(batch)) for batch in batches)
        self.num_data = self.model.num_data = _count(module, data, found)
        execution = self.model.chains.execution
        temperature = module.temperature
        assert isinstance(temperature, float), "_copied has checked it"
        self.energy = FullEnergy(self.model, batches, temperature, execution in ("auto", "vmap"))
        self.columns = Columns.of_datamodule(data)
        fixed = {n: t for n, t in state_of(self.model).items() if n not in self.energy.names}
        self._facts = {"data": digest(batches), "what is not sampled": digest(fixed)}

    def facts(self) -> dict[str, Any]:
        """Return what the density depends on, as plain data, to be compared when a run continues."""
        model = self.model
        shapes = {name: list(tensor.shape) for name, tensor in named_trainable(model).items()}
        return self._facts | {
            "parameters": shapes,
            "likelihood": repr(model.likelihood),
            "prior": repr(model.prior),
            "temperature": self.energy.temperature,
            "dtype": str(self.initial.dtype),
            "N": self.num_data,
        }

    def shared(self) -> dict[str, Tensor]:
        """Return what is not sampled, by name."""
        return self.model.chains.sharing.tensors()

    def sample(self, row: Tensor, energy: float, step: int, chain: int) -> PosteriorSample:
        """Return a draw, parameters of shape (P,) with U/τ there, as a sample."""
        model, shared = self.model, self.shared()
        self.energy.put(row)
        named = named_trainable(model)
        buffers = {n: b for n, b in model.named_buffers() if n not in shared and not is_prior_state(n)}
        with torch.no_grad():
            scales = self._scales(step, chain)
            parameters = {name: tensor.detach().clone() for name, tensor in collapsed(named, model).items()}
        potential = energy * self.energy.temperature
        parts: dict[str, Any] = {"parameters": parameters, "buffers": buffers, "scales": scales, "shared": shared}
        return PosteriorSample(step, 0, chain, potential, temperature=self.energy.temperature, **parts)

    def _scales(self, step: int, chain: int) -> dict[str, Tensor]:
        """Draw the scales of a hierarchical prior from their law given the parameters."""
        prior = self.model.prior
        if not isinstance(prior, HierarchicalPrior):
            return {}
        tensors = of_prior(self.model)
        generator = np.random.default_rng(derive_seed(self._seed, "scales", chain, step))
        mode = prior.mode(prior.squares(tensors))
        noise = prior.noise(self.energy.temperature, generator).to(mode)
        drawn = {**tensors, VARIANCE: (mode * noise).to(tensors[VARIANCE])}
        return prior.scales(Entries(drawn, held_rows(self.model)))


def plain_copy(module: BayesianModule) -> BayesianModule:
    """Return a copy of a module without its collected samples."""
    memo: dict[int, Any] = {} if module.posterior is None else {id(module.posterior): None}
    return copied(module, memo)


def _copied(module: BayesianModule) -> BayesianModule:
    """Return a copy of a module as one chain in evaluation mode, with what it samples and its prior's tensors."""
    if not isinstance(module, BayesianModule):
        raise TypeError(f"module must be a BayesianModule, got a {type(module).__name__}: give the network a prior")
    if module.chains.stacked is not None:
        raise ValueError(
            f"the module holds {module.num_chains} stacked chains of a fit: pass a new module, and the states of these "
            "as start=[…] if the chains should begin there"
        )
    if not isinstance(module.temperature, float) or not module.temperature > 0:
        raise ValueError(
            f"temperature={module.temperature} of the module is not one positive number: pass temperature=1.0 for the "
            "posterior"
        )
    check_hooks(module)  # a copy has no hooks
    model = plain_copy(module)
    model.chains.num_chains, model.chains.start = 1, "same"
    model.configure_model()
    check_model(model)
    named = named_trainable(model)
    if not named:
        raise ValueError(f"{type(model).__name__} has no trainable parameters to sample: set requires_grad")
    EnergyModel.log_prior(model)  # raises now if a parameter has no prior
    model.prior.check_names(list(named))
    _check_normalisation(model)
    model.eval()
    return model


def _check_normalisation(model: EnergyModel) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    bad = next((layer for layer in layers if layer.running_mean is None), None)
    if bad is not None:
        raise ValueError(
            f"{type(bad).__name__} without running statistics makes the energy of an example depend on its batch: the "
            "posterior is not defined: use track_running_stats=True, GroupNorm or LayerNorm"
        )
    if differs_in_training(model):
        warnings.warn(
            "The network has BatchNorm or dropout. The energy of all data is computed in evaluation mode: dropout is "
            "off, and the running statistics of the module as it is are constants that all chains share.",
            stacklevel=5,
        )


def _starts(model: BayesianModule, start: ChainStart, chains: int, seed: int) -> Tensor:
    """Return each chain's start as a row of the sampled parameters; the model's own tensors stay."""
    given = {name: tensor.detach().clone() for name, tensor in state_of(model).items()}
    layout, rows, held = ChainLayout(0, chains, chains), [], held_rows(model)
    with torch.no_grad():
        for chain in range(chains):
            start_chain(model, start, layout, chain, seed, model.initialise_chain, model.chains.sharing.names)
            named = named_trainable(model)
            _check_held(named, given, held, chain)
            flat = torch.cat([tensor.reshape(-1) for tensor in named.values()])
            rows.append(torch.cat([flat[part] for part in sampled_columns(named, held)]))
            for name, tensor in state_of(model).items():
                tensor.copy_(given[name])
    return torch.stack(rows)


def _check_held(named: Mapping[str, Tensor], given: Mapping[str, Tensor], held: Mapping[str, int], chain: int) -> None:
    """Raise ValueError unless a chain's held rows are the model's, which all chains share."""
    for name, row in held.items():
        if not torch.equal(named[name][row], given[name][row]):
            raise ValueError(
                f"the start of chain {chain} has other values than the module in row {row} of '{name}', the padding "
                "row, which is not sampled: pass starts with the module's values of it"
            )


def _count(module: BayesianModule, data: Any, found: int) -> int:
    """Return N, which all sources must agree on."""
    declared = getattr(data, "num_data", None)
    for what, count in (("num_data", module.given_num_data), (f"{type(data).__name__}.num_data", declared)):
        if count is not None and int(count) != found:
            raise ValueError(
                f"{what}={count} contradicts the {found} training data: leave num_data out, and pass all data"
            )
    return found
