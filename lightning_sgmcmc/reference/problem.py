"""A module and its data as what chains of Hamiltonian Monte Carlo need: energies, starts, samples."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.first_batches import check_batch
from lightning_sgmcmc.chains.layers import check_hooks
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.starts import ChainStart, check_start, start_chain
from lightning_sgmcmc.chains.stateless import state_of
from lightning_sgmcmc.evaluation.full_energy import differs_in_training
from lightning_sgmcmc.expansion import collapsed
from lightning_sgmcmc.model import EnergyModel, check_model, named_trainable, of_prior
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.held import Entries, held_rows, sampled_columns
from lightning_sgmcmc.priors.hierarchical import VARIANCE
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.reference.data import all_batches, count_of, digest, length_of
from lightning_sgmcmc.reference.energies import FullEnergy
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tables import Columns


class Problem:
    """The posterior of a module given its data; the module is copied and stays as it is.

    Args:
        module: the module, of one chain or not yet stacked.
        data: see `all_batches`.
        batch_size: data in a piece of the energy.
        chains: C.
        start: how chains start, see `BayesianModule`; None is as the module says.
        seed: of the starts, and of the scales of a `HierarchicalPrior`.
        dtype: of the chains; None is the module's.

    Attributes:
        model: the copy, in evaluation mode.
        energy: U/τ over all data.
        num_data: N.
        initial: positions at the start, shape (C, P).
        columns: what inputs and targets are, if a datamodule says so.

    Raises:
        TypeError: if the module is no `BayesianModule`.
        ValueError: for a module with stacked chains, a temperature that is not one positive number, BatchNorm without
            running statistics, or data that do not suit the module.
    """

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
        self.num_data = self.model.num_data = _count(module, data, length_of(self.model, batches))
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
        """Return a draw as a sample of the posterior.

        Args:
            row: the sampled parameters, shape (P,).
            energy: U/τ.
            step: the iteration, from 1, warm-up included.
            chain: its number in the run.
        """
        model, shared = self.model, self.shared()
        self.energy.put(row)
        named = named_trainable(model)
        buffers = {n: b for n, b in model.named_buffers() if n not in shared and not is_prior_state(n)}
        with torch.no_grad():
            scales = self._scales(step, chain)
            parameters = {name: tensor.detach().clone() for name, tensor in collapsed(named, model).items()}
        return PosteriorSample(
            step=step,
            cycle=0,
            chain=chain,
            energy=energy * self.energy.temperature,
            parameters=parameters,
            buffers=buffers,
            scales=scales,
            shared=shared,
        )

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
    return copy.deepcopy(module, memo)


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
            f"{type(bad).__name__} without running statistics makes the energy of a datum depend on its batch, so the "
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
    for what, count in (("num_data", module.given_num_data), (f"{type(data).__name__}.num_data", count_of(data))):
        if count is not None and count != found:
            raise ValueError(
                f"{what}={count} contradicts the {found} training data: leave num_data out, and pass all data"
            )
    return found
