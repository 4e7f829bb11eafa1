"""Chains: the component of a BayesianModule that holds its chains, their energies, gradients and state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_sgmcmc.chains.claims import Claims
from lightning_sgmcmc.chains.energies import ChainEnergies, Execution
from lightning_sgmcmc.chains.first_batches import FirstBatches
from lightning_sgmcmc.chains.gradients import ChainGradients
from lightning_sgmcmc.chains.graphs import free_graphs
from lightning_sgmcmc.chains.layers import check_hooks, prepare_layers
from lightning_sgmcmc.chains.layout import ChainLayout, layout_of
from lightning_sgmcmc.chains.seeds import FitSeeds
from lightning_sgmcmc.chains.sharing import Sharing
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.chains.starts import ChainStart, check_start, start_chain
from lightning_sgmcmc.chains.state import Accumulation, Counters, ObservedEnergy, Progress, Pulse, SampleTags
from lightning_sgmcmc.chains.stateless import state_of
from lightning_sgmcmc.chains.step_sizes import StepSize, groups_by_pattern, values_of
from lightning_sgmcmc.chains.weights import DataWeights
from lightning_sgmcmc.checks import check_choice, check_count, check_flag
from lightning_sgmcmc.compiling import Compile, check_compile
from lightning_sgmcmc.model import EnergyModel, check_layers, named_trainable
from lightning_sgmcmc.priors.held import held_rows
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.tensors import as_rows


class Chains(ChainGradients):
    """A process's chains of a model, and the chain state that callbacks read and write.

    A model with one chain in its process keeps its ordinary tensors. With more, every parameter and buffer gets a
    leading chain axis when a fit begins (see `StackedChains`).

    Args:
        model: the model; `BayesianModule` creates this object itself.
        num_chains: C, chains in this process.
        start: "own" draws a start for each chain except the first, "same" starts all at the model's values; or states.
        shared_batch: whether all chains see the same mini-batches.
        execution: see `BayesianModule`; "auto" loops on a CPU.
        compiled: whether to compile the network by `torch.compile`; "auto" does on CUDA.
        seed: seed of starts and noise; None uses `seed_everything`'s, or a random one.

    Attributes:
        layout: which chains of the run this process holds.
        seeds: the seed of the run and of the present fit.
        stacked: the stacked tensors, None for a single unstacked chain.
        sharing: what all chains share, which is not sampled.
        trainable: the sampled parameters by name, once the sampler is made.
        flat: the sampled parameters as rows of one tensor during a fit; None where they are not.
        energies: computes Ũ/N of a batch during a fit.
        weights: how much a datum of a batch counts during a fit.
        num_data_is_given: whether the user passed N.
        observed, accumulation, progress, tags, counters, pulse: the state of the run, by subject (see `chains.state`).
        claims: which callback does which part of a step.
    """

    def __init__(
        self,
        model: EnergyModel,
        num_chains: int = 1,
        start: ChainStart = "own",
        shared_batch: bool = False,
        execution: Execution = "auto",
        compiled: Compile = "auto",
        seed: int | None = None,
    ) -> None:
        check_count("num_chains", num_chains, optional=False)
        check_count("seed", seed, least=0)
        check_start(start)
        check_choice("chain_execution", execution, get_args(Execution))
        check_flag("shared_batch", shared_batch)
        check_compile(compiled)
        self.model = model
        self.num_chains = num_chains
        self.start = start
        self.shared_batch = shared_batch
        self._execution = execution
        self.compiled = compiled
        self.seeds = FitSeeds(seed)
        self.layout = ChainLayout()
        self.stacked: StackedChains | None = None
        self._started: range | None = None
        self.sharing = Sharing(model)
        self.trainable: dict[str, Tensor] = {}
        self.energies: ChainEnergies | None = None
        self.weights: DataWeights | None = None
        self.num_data_is_given = False
        self.claims = Claims()
        self.reset()

    def reset(self, num_data: int = 1) -> None:
        """Clear the state of an earlier fit.

        Args:
            num_data: N of the coming fit.
        """
        self.observed = ObservedEnergy(num_data=num_data)
        self.accumulation = Accumulation()
        self.progress = Progress()
        self.tags = SampleTags(log_weight=torch.zeros(self.num_chains))
        self.counters = Counters()
        self.pulse = Pulse()

    # -- storage and starts -------------------------------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer | None, initialise: Callable[[int], None]) -> None:
        """Set the layout of the chains, and stack them once.

        Args:
            trainer: the run's; None outside a run.
            initialise: draws the start of the chain with this global index into the model's own tensors.
        """
        self.layout = layout_of(trainer, self.num_chains)
        check_hooks(self.model)
        starts = self._started is None and self.start == "own" and self.layout.total_chains > 1
        self.seeds.begin(trainer, starts)  # here, where all ranks are
        if self.stacked is None:
            self.sharing.begin()
            prepare_layers(self.model)
        if self._started is None:
            self._start(initialise)
        elif self._started != self.layout.chains:
            rank_zero_warn(
                "This module's chains began in another layout, so chains on several processes continue from the "
                "same states: create a new module for a run on several processes."
            )
        self.sharing.agree(self.layout)

    def _start(self, initialise: Callable[[int], None]) -> None:
        """Draw the starts of this process's chains, and stack them; see `begin`."""
        if self.num_chains == 1 and (self.start == "same" or (self.start == "own" and self.layout.first_chain == 0)):
            return
        check_layers(self.model)
        self._started = self.layout.chains

        def start(index: int) -> None:
            start_chain(self.model, self.start, self.layout, index, self.seed or 0, initialise, self.sharing.names)

        if self.num_chains > 1:
            self.stacked = StackedChains(self.model, self.num_chains, start, self.sharing.names)
        else:
            with torch.no_grad():
                start(0)

    @property
    def seed(self) -> int | None:
        """The seed of the present fit, of which starts, noise, batches and all draws of callbacks are functions."""
        return self.seeds.seed

    def are_stacked_in(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether a state dict holds stacked chains while this object's are not stacked yet.

        Raises:
            ValueError: if they are stacked, and those of the state dict share other tensors.
        """
        if self.stacked is not None:
            self.sharing.check_state(state_dict)
        if self.num_chains == 1 or self.stacked is not None:
            return False
        own = {name: p.dim() for name, p in self.model.named_parameters() if p.requires_grad}
        return any(state_dict[name].dim() == dim + 1 for name, dim in own.items() if name in state_dict)

    @contextmanager
    def at(self, chain: int) -> Iterator[None]:
        """Select one chain: inside the context, the model is that chain's ordinary network.

        Args:
            chain: its index in this process, from 0.

        Raises:
            IndexError: if there is no such chain.
        """
        if not 0 <= chain < self.num_chains:
            raise IndexError(f"chain must be between 0 and {self.num_chains - 1}, got {chain}")
        if self.stacked is None:
            yield
            return
        with self.stacked.at(chain):
            yield

    def first_bad(self, name: str) -> int:
        """Return the global index of the first chain whose tensor `name` is not finite."""
        if name in self.sharing.names:
            return self.layout.first_chain
        rows = as_rows(state_of(self.model)[name], self.num_chains)
        return self.layout.chains[int((~rows.isfinite()).any(1).byte().argmax())]

    def own_control(self, name: str, value: float | Sequence[float]) -> "float | Tensor":
        """Return a control for this process's chains: one number for all, or a tensor of shape (C,).

        Args:
            name: the control's name, for the message.
            value: a number, or one per chain of the run.

        Raises:
            ValueError: if a sequence does not have one value per chain.
        """
        if isinstance(value, int | float):
            return value
        total = self.layout.total_chains
        if len(value) != total:
            raise ValueError(f"{name} has {len(value)} values, and the run has {total} chains: pass one for each")
        own = torch.tensor([value[chain] for chain in self.layout.chains], device=self.model.device)
        return own if len(own) > 1 else own.item()

    def make_sampler(
        self, factory: Callable[..., Any], lr: "StepSize | None", temperature: float | Sequence[float]
    ) -> Sampler:
        """Return a sampler for the trainable parameters, with N, the seed and the number of chains filled in.

        Args:
            factory: a sampler class, or a callable that returns a sampler for parameters and keyword arguments.
            lr: step size, one per chain of the run, or by name pattern; None uses the sampler's default.
            temperature: τ, or one per chain of the run.

        Raises:
            TypeError: if the factory returns another kind of object.
        """
        options: dict[str, Any] = {
            "num_data": self.observed.num_data,
            "temperature": self.own_control("temperature", temperature),
            "num_chains": self.num_chains,
            "seed": self.seed,
        }
        if self.layout.first_chain:
            options["first_chain"] = self.layout.first_chain
        parameters: Any = self.trainable.values()
        if isinstance(lr, Mapping):
            parameters, options["lr"] = groups_by_pattern(self.trainable, lr, self.own_control), max(values_of(lr))
        elif lr is not None:
            options["lr"] = self.own_control("lr", lr)
        sampler = factory(parameters, **options)
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"sampler={name_of(factory)} returned a {type(sampler).__name__}, which adds no noise: use one of "
                "lightning_sgmcmc.samplers (at temperature 0 they equal torch's optimizers)"
            )
        if sampler.seed != self.seed:
            raise ValueError(
                f"sampler={name_of(factory)} made a sampler with seed {sampler.seed}, and this fit's is {self.seed}: "
                "pass the keyword argument `seed` on to it, and give the module the run's (BayesianModule(seed=…))"
            )
        sampler.hold({self.trainable[name]: row for name, row in held_rows(self.model).items()})
        return sampler

    # -- energies -----------------------------------------------------------------------------------------------------

    @property
    def execution(self) -> Execution:
        """How chains are computed on the model's device; "auto" is all at once in the faster way."""
        return "loop" if self._execution == "auto" and self.model.device.type == "cpu" else self._execution

    def begin_energies(self, trainer: pl.Trainer) -> None:
        """Choose how the chains' energies are computed, when a fit begins."""
        self.sharing.set_evaluating()
        num_data, flat = self.observed.num_data, self.flat
        self.energies = ChainEnergies(
            self.model, self.stacked, self.execution, self.compiled, num_data, self.trainable, flat
        )
        first = self.energies.first_batches = FirstBatches(self.model, self.stacked)
        self.weights = DataWeights(trainer, self.layout, num_data, self.num_data_is_given, first)
        # A data-parallel wrapper sees only the stacked parameters.
        wrapped = isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel)
        self.energies.through_stack = wrapped and self.stacked is not None

    def end_energies(self) -> None:
        """Drop the objects of a fit, so that the model can be copied and pickled, and free its CUDA graphs."""
        replayed = self.energies is not None and self.energies.replays
        self.energies = self.weights = None
        if replayed:
            free_graphs()
        self.claims.clear()

    def potential_energy(self, batch: Any, num_data: int) -> Tensor:
        """Return Ũ of a batch for each chain, shape (C,), in nats, differentiable in the stacked parameters.

        Args:
            batch: one batch for all chains, or a `ChainBatches` with one for each.
            num_data: N.
        """
        energies = self.energies
        if energies is None or energies.num_data != num_data:
            energies = ChainEnergies(self.model, self.stacked, "loop", False, num_data, named_trainable(self.model))
        step = energies(batch, through_stack=True)
        return step.mean_potential.reshape(-1) * num_data

    def loss(self, batch: Any, batch_idx: int, trainer: pl.Trainer) -> Tensor:
        """Return the loss Σ_c Ũ_c/N of a micro-batch, and record its energies.

        Args:
            batch: the micro-batch.
            batch_idx: its index in the epoch.
            trainer: the run's.
        """
        assert self.energies is not None
        assert self.weights is not None
        step = self.energies(
            batch,
            seed_chain=self.claims.get("seed chain"),
            keeps_each=self.observed.keeps_each,
            weigh=partial(self.weights.factor, batch_idx, self.accumulation.candidates),
        )
        self.weights.add(step.batch_size, batch_idx)
        self.pulse.count += 1
        self.counters.gradient_evaluations += step.batch_size * self.layout.ranks_per_chain
        potential = step.mean_potential if step.loss is None else step.loss
        if self.layout.ranks_per_chain > 1:
            # A non-finite energy gets a NaN gradient, so that all ranks see it; finite ones are unchanged.
            potential = potential * (potential.detach() * 0 + 1)
        accumulated, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        position, expected = self.accumulation.advance(batch_idx, accumulated, batches, trainer.is_last_batch)
        self.observed.record(step, position)
        # Lightning divides by the full window, even if the epoch's last one is shorter.
        self.accumulation.loss_scale = accumulated / expected
        loss = potential.sum() if potential.dim() else potential
        # Its value is comparable between batches; its gradient has the weights.
        return loss if step.excess is None else loss + step.excess


def chains_of(module: pl.LightningModule) -> Chains:
    """Return the chains of a `BayesianModule`.

    Raises:
        TypeError: if the module is not a `BayesianModule`.
    """
    chains = getattr(module, "chains", None)
    if not isinstance(chains, Chains):
        raise TypeError(f"{type(module).__name__} holds no chains: derive it from lightning_sgmcmc.BayesianModule")
    return chains


def sampler_of(module: pl.LightningModule) -> Sampler:
    """Return the sampler that trains a module in the running fit.

    Raises:
        TypeError: if another optimizer trains it.
    """
    optimizer = module.optimizers(use_pl_optimizer=False)
    if not isinstance(optimizer, Sampler):
        raise TypeError(
            f"{type(module).__name__} should be trained by one sampler, got {type(optimizer).__name__}: do not "
            "override configure_optimizers, or return one sampler from it"
        )
    return optimizer
