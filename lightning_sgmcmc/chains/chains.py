"""Chains: the component of a BayesianModule that holds its chains, their energies, gradients and state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sgmcmc.chains.energies import ChainEnergies, Execution, targets_explained
from lightning_sgmcmc.chains.execution import free_graphs, state_of
from lightning_sgmcmc.chains.layers import check_hooks, explained, prepare_layers
from lightning_sgmcmc.chains.layout import (
    ChainLayout,
    FitSeeds,
    average_over_ranks,
    buffers_of_steps,
    layout_of,
    leave_out_wrapper,
    share_in_group,
)
from lightning_sgmcmc.chains.stacked import StackedChains, check_free, check_num_chains, clip_each_chain
from lightning_sgmcmc.chains.starts import ChainStart, Sharing, check_start, start_chain
from lightning_sgmcmc.chains.state import (
    Accumulation,
    Claims,
    Counters,
    ObservedEnergy,
    Progress,
    Pulse,
    SampleTags,
    StepEnergy,
)
from lightning_sgmcmc.chains.weights import DataWeights, FirstBatches
from lightning_sgmcmc.checks import check_choice, check_control, check_count, check_flag
from lightning_sgmcmc.compiling import Compile, check_compile, choice_for, is_compiled
from lightning_sgmcmc.model import EnergyModel, check_layers, named_trainable
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.priors.base import check_patterns
from lightning_sgmcmc.priors.state import held_rows, is_prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.samplers.rows import FlatParameters, clip_rows, compiled
from lightning_sgmcmc.tensors import Control, as_rows

DDPStrategy = pl.strategies.DDPStrategy


class Chains:
    """A process's chains of a model, and the chain state that callbacks read and write.

    A model with one chain in its process keeps its ordinary tensors. With more, every parameter and buffer gets a
    leading chain axis when a fit begins (see `StackedChains`).

    Args:
        model: the model; `BayesianModule` creates this object itself.
        num_chains: C, chains in this process.
        start: "own" draws a start for each chain except the first, "same" starts all at the model's values; or states.
        shared_batch: whether all chains see the same mini-batches.
        execution: see `BayesianModule`; "auto" loops on a CPU.
        compiled: whether to compile the network by `torch.compile`; "auto" does in a long fit on CUDA.
        seed: seed of starts and noise; None uses `seed_everything`'s, or a random one.

    Attributes:
        layout: which chains of the run this process holds.
        seeds: the seed of the run and of the present fit.
        stacked: the stacked tensors, None for a single unstacked chain.
        sharing: what all chains share, which is not sampled.
        trainable: the sampled parameters by name, once the sampler is made.
        flat: the sampled parameters as rows of one tensor during a fit; None where they are not.
        energies: computes Ũ/N of a batch during a fit.
        weights: how much an example of a batch counts during a fit.
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
        self.compiles = compiled
        """What the present fit makes of `compiled`."""
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
        self.flat: FlatParameters | None = None
        self._one: Tensor | None = None
        """The gradient of a loss by itself."""
        self._averages = False
        """Whether gradients are averaged here over the ranks that share the chains."""
        self._shared_each_step: list[str] = []
        """The buffers that these ranks share at every step."""
        self.traces = False
        """Whether a fit's energies and their gradient are computed by traced operations, see `ChainEnergies.traced`."""
        self.has_diverged = False
        """Whether the last fit ended by an energy or a number of the state that is not finite."""
        self.reset()

    def reset(self, num_data: int = 1) -> None:
        """Clear the state of an earlier fit; N is that of the coming one."""
        self.observed = ObservedEnergy(num_data=num_data)
        self.accumulation = Accumulation()
        self.progress = Progress()
        self.tags = SampleTags(log_weight=torch.zeros(self.num_chains))
        self.counters = Counters()
        self.pulse = Pulse()

    # -- storage and starts -------------------------------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer | None, initialise: Callable[[int], None]) -> None:
        """Set the layout of the chains, and stack them once; `initialise` draws a chain's start into the model's own
        tensors."""
        self.layout = layout_of(trainer, self.num_chains)
        leave_out_wrapper(self.layout.strategy)
        check_hooks(self.model)
        starts = self._started is None and self.start == "own" and self.layout.total_chains > 1
        self.seeds.begin(trainer, starts)  # here, where all ranks are
        if self.stacked is None:
            check_free(self.model)
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
        """Return whether a state dict holds stacked chains while this object's are not stacked yet; raise for another
        number of chains."""
        check_num_chains(self.model, state_dict, self.num_chains, self.stacked is not None)
        if self.stacked is not None:
            self.sharing.check_state(state_dict)
        if self.num_chains == 1 or self.stacked is not None:
            return False
        own = {name: p.dim() for name, p in self.model.named_parameters() if p.requires_grad}
        return any(state_dict[name].dim() == dim + 1 for name, dim in own.items() if name in state_dict)

    @contextmanager
    def at(self, chain: int) -> Iterator[None]:
        """Select one chain, by its index in this process: inside the context, the model is its ordinary network."""
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
        """Return a control for this process's chains, shape (C,), from one number for all or one per chain of a run."""
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
        """Return a sampler for the trainable parameters, with N, the seed and the number of chains filled in."""
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
        loops = self._execution == "auto" and self.model.device.type == "cpu" and not self.traces
        return "loop" if loops else self._execution

    @property
    def chosen_execution(self) -> Execution:
        """What the user has chosen of how chains are computed."""
        return self._execution

    def begin_energies(self, trainer: pl.Trainer) -> None:
        """Choose how the chains' energies are computed, when a fit begins."""
        self.sharing.set_evaluating()
        num_data, flat = self.observed.num_data, self.flat
        self.traces = self.traces and flat is not None
        self.energies = ChainEnergies(
            self.model, self.stacked, self.execution, self.compiles, num_data, self.trainable, flat, self.traces
        )
        first = self.energies.first_batches = FirstBatches(self.model, self.stacked, self.energies.are_rows)
        self.weights = DataWeights(trainer, self.layout, num_data, self.num_data_is_given, first)
        # A data-parallel wrapper sees only the stacked parameters.
        self.energies.through_stack = _is_wrapped(trainer) and self.stacked is not None
        replicas = self.layout.ranks_per_chain > 1 and isinstance(trainer.strategy, DDPStrategy)
        self._averages = replicas and not _is_wrapped(trainer)
        self._shared_each_step = self._own_buffers(buffers_of_steps(self.model)) if self._averages else []

    def end_energies(self) -> None:
        """Drop the objects of a fit, so that the model can be copied and pickled, and free its CUDA graphs."""
        replayed = self.energies is not None and self.energies.replays
        self.sharing.set_back()
        self.energies = self.weights = None
        if replayed:
            free_graphs()
        self.claims.clear()

    def potential_energy(self, batch: Any, num_data: int) -> Tensor:
        """Return Ũ of a batch, or of one for each chain, shape (C,), in nats, differentiable in the stacked
        parameters."""
        energies = self.energies
        if energies is None or energies.num_data != num_data:
            energies = ChainEnergies(self.model, self.stacked, "loop", False, num_data, named_trainable(self.model))
        step = energies(batch, through_stack=True)
        return step.mean_potential.reshape(-1) * num_data

    def loss(self, batch: Any, batch_idx: int, trainer: pl.Trainer) -> Tensor:
        """Return the loss Σ_c Ũ_c/N of a micro-batch, and record its energies."""
        assert self.energies is not None
        assert self.weights is not None
        if self._shared_each_step and not self.accumulation.accumulating:
            self.share_buffers(self._shared_each_step)
        weigh = partial(self.weights.factor, batch_idx, self.accumulation.candidates)
        with targets_explained(self.model, self.stacked, batch):
            keeps, seed_chain = self.observed.keeps_each, self.claims.get("seed chain")
            step = self.energies(batch, seed_chain=seed_chain, keeps_each=keeps, weigh=weigh)
        return self._recorded(step, batch_idx, trainer)

    def take_gradient(self, batch: Any, batch_idx: int, trainer: pl.Trainer, checks: bool) -> Tensor:
        """Compute the gradient of a micro-batch's Σ_c Ũ_c/N by traced operations, add it to those before in its step,
        and record the energies; return the loss."""
        assert self.energies is not None
        assert self.weights is not None
        assert self.flat is not None
        weigh = partial(self.weights.factor, batch_idx, self.accumulation.candidates)
        with targets_explained(self.model, self.stacked, batch):
            step, gradient = self.energies.traced(batch, self.observed.keeps_each, weigh, checks)
        loss, accumulated = self._recorded(step, batch_idx, trainer), trainer.accumulate_grad_batches
        if accumulated > 1:
            gradient = gradient * (self.accumulation.loss_scale / accumulated)
        self.flat.set_gradients(gradient, adds=batch_idx % accumulated > 0)
        if self.accumulation.batch_complete and (correct := self.claims.get("snapshot gradients")) is not None:
            correct()
        return loss

    def stop_tracing(self, trainer: pl.Trainer) -> None:
        """Compute the energies operation by operation from the coming step on."""
        before, weights, self.traces = self.energies, self.weights, False
        self.compiles = choice_for(self.compiled, self.model.device, trainer)
        self.begin_energies(trainer)
        if self.energies is not None and before is not None:
            self.energies.first_batches, self.weights = before.first_batches, weights

    def _recorded(self, step: StepEnergy, batch_idx: int, trainer: pl.Trainer) -> Tensor:
        """Record a micro-batch's energies; return its loss."""
        assert self.weights is not None
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

    # -- gradients ----------------------------------------------------------------------------------------------------
    #
    # They arrive in the parameters themselves; in the slices of stacked chains that are computed one after another; or
    # in the rows of one tensor, where a step over all tensors costs one operation.

    def flatten(self, sampler: Sampler, trainer: pl.Trainer) -> None:
        """Make the sampled parameters views of one tensor, with a row for each chain, where a step gains from it: with
        several chains, and with a compiled network on a GPU."""
        self.unflatten(sampler)
        self.compiles = False if self.traces else choice_for(self.compiled, self.model.device, trainer)
        groups = [group["params"] for group in sampler.param_groups]
        fused = self.model.device.type == "cuda" and is_compiled(self.compiles, self.model.device)
        gains = self.stacked is not None or fused or self.traces
        # A data-parallel wrapper has gradients of its own.
        gains = gains and not _is_wrapped(trainer)
        if gains and FlatParameters.suits([p for group in groups for p in group], self.num_chains):
            self.flat = sampler.flat = FlatParameters(groups, self.num_chains, fused)
            accumulates = trainer.accumulate_grad_batches > 1
            if self.stacked is not None and not self._arrive_in_rows and self.flat.is_large and not accumulates:
                self.stacked.receive(self.flat)

    def unflatten(self, sampler: Sampler | None) -> None:
        """Give the sampled parameters memory of their own, at a fit's end."""
        if self.flat is not None:
            if self.stacked is not None and self.stacked.receives:
                self.stacked.receive(None)
            self.flat.release()
        self.flat = None
        if sampler is not None:
            sampler.flat = None

    @property
    def _arrive_in_rows(self) -> bool:
        return self.flat is not None and (self.stacked is None or self.execution != "loop")

    def gradients(self) -> list[Tensor]:
        """Return the gradients themselves in as few tensors as hold them, with a leading axis where C > 1."""
        if self.flat is not None and self.flat.holds_gradients:
            return [self.flat.gradients]
        return [p.grad for p in self.trainable.values() if p.grad is not None]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and gather its gradients; raise for several chains that compute activations again."""
        if self.accumulation.loss_scale != 1:
            loss = loss * self.accumulation.loss_scale
        if not args and kwargs.get("gradient") is None and loss.dim() == 0:
            if self._one is None or self._one.dtype != loss.dtype or self._one.device != loss.device:
                self._one = torch.ones_like(loss)
            kwargs["gradient"] = self._one  # autograd would make one at every step
        with explained(self.num_chains):
            loss.backward(*args, **kwargs)
        self.gather_gradients()

    def gather_gradients(self) -> None:
        """Gather the gradients after a backward pass; correct them once the batch is complete."""
        self.pulse.count += 1
        if self.flat is not None and self._arrive_in_rows:
            self.flat.collect_gradient()
        if not self.accumulation.batch_complete:
            return
        collects = self.energies is not None and self.energies.collects
        if collects:
            self.collect_gradients()
        if self._averages and not self.accumulation.accumulating:
            self._average_gradients()
        if self.accumulation.rescaling != 1:
            torch._foreach_mul_(self.gradients(), self.accumulation.rescaling)
        correct = self.claims.get("snapshot gradients")
        if correct is not None:
            correct()
            if collects and self.accumulation.accumulating:
                self.spread_gradients()  # the next batch adds its gradients to these

    def _average_gradients(self) -> None:
        """Average a step's gradients over the ranks that share the chains; a tensor without one counts as zero."""
        for parameter in self.trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_over_ranks(self.gradients(), self.layout.ranks_per_chain, self.layout.group)

    def share_buffers(self, names: Sequence[str] | None = None) -> None:
        """Take buffers of the chains, all without `names`, from the first of the ranks that share the chains."""
        if self.layout.ranks_per_chain > 1:
            buffers = dict(self.model.named_buffers())
            share_in_group([buffers[n].detach() for n in names or self._own_buffers(buffers)], self.layout.group)

    def _own_buffers(self, names: Iterable[str]) -> list[str]:
        """Return those names of buffers that are neither shared by all chains nor functions of the prior's draws."""
        return [name for name in names if name not in self.sharing.names and not is_prior_state(name)]

    def collect_gradients(self) -> None:
        """Copy the slices' gradients to the stacked parameters."""
        if self.stacked is not None and not self._arrive_in_rows:
            self.stacked.collect_gradients(self.flat)

    def spread_gradients(self) -> None:
        """Copy the parameters' gradients to where they arrive, to continue accumulating."""
        if self.flat is not None and self._arrive_in_rows:
            self.flat.adopt_gradients()
        elif self.stacked is not None:
            self.stacked.spread_gradients()

    def clear_gradients(self, sampler: Optimizer) -> None:
        """Clear the gradients of a sampler's parameters."""
        if self.flat is not None and self._arrive_in_rows:
            self.flat.clear_gradients()
            return
        sampler.zero_grad()
        if self.stacked is not None:
            self.stacked.clear_gradients()
        if self.energies is not None:
            self.energies.keep_gradients(self.trainable.values())

    def clip_gradients(self, limit: float) -> bool:
        """Scale each chain's gradient down to a norm of at most `limit`; return False for what Lightning can clip, the
        tensors of one chain."""
        flat = self.flat
        if flat is not None and flat.holds_gradients and flat.gradients.device.type != "cpu":
            clip = compiled(clip_rows) if flat.fused else clip_rows
            clip(flat.gradients, limit)
        elif self.stacked is not None:  # on a CPU, tensor by tensor, bit for bit as alone
            clip_each_chain([p.grad for p in self.trainable.values() if p.grad is not None], limit)
        else:
            return False
        return True


def _is_wrapped(trainer: pl.Trainer) -> bool:
    return isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel)


class ChainModel(EnergyModel):
    """A model with its chains, as the services of a run see it; `BayesianModule` is the one that users derive from."""

    if TYPE_CHECKING:  # annotations of a class would be read by scripting
        chains: Chains
        lr: "StepSize | None"
        temperature: float | tuple[float, ...]
        num_data: int | None
        given_num_data: int | None
        sampler_factory: Callable[..., Sampler]
        posterior: Any  # subjects above set these, and `BayesianModule` types them
        evaluations: dict[str, Any]
        health: Any
        contour: Any
        plan: Any
        other_weights: Any

        @property
        def num_chains(self) -> int: ...

        @property
        def sampler(self) -> Sampler: ...

        @property
        def reads_samples(self) -> bool: ...

        @property
        def target_temperature(self) -> float | Tensor: ...

        def replaces(self, method: str) -> bool: ...


def chain_model(module: pl.LightningModule) -> ChainModel:
    """Return a module, typed as one with chains."""
    if not isinstance(module, ChainModel):
        raise TypeError(f"{type(module).__name__} holds no chains: derive it from lightning_sgmcmc.BayesianModule")
    return module


def chains_of(module: pl.LightningModule) -> Chains:
    """Return the chains of a `BayesianModule`."""
    return chain_model(module).chains


def sampler_of(module: pl.LightningModule) -> Sampler:
    """Return the sampler that trains a module in the running fit, which no other optimizer may train."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    if not isinstance(optimizer, Sampler):
        raise TypeError(
            f"{type(module).__name__} should be trained by one sampler, got {type(optimizer).__name__}: do not "
            "override configure_optimizers, or return one sampler from it"
        )
    return optimizer


# -- step sizes --------------------------------------------------------------------------------------------------------


EachChain: TypeAlias = "float | Sequence[float]"
"""One number for all chains, or one for each chain of the run."""
StepSize: TypeAlias = "EachChain | Mapping[str, EachChain]"
"""A step size, or step sizes by name pattern."""


def check_step_size(lr: "StepSize | None") -> None:
    """Raise unless `lr` is None, a finite number ≥ 0, one for each chain, or such values by pattern."""
    if not isinstance(lr, Mapping):
        check_control("lr", lr)
        return
    if not lr:
        raise ValueError("lr has no patterns: pass one number, or numbers by pattern")
    for pattern, value in lr.items():
        if not isinstance(pattern, str):
            raise TypeError(f"lr has the pattern {pattern!r}: patterns are texts such as '*.bias'")
        if value is None:
            raise TypeError(f"lr must be a number, got None for '{pattern}'")
        check_control(f"lr of '{pattern}'", value)


def values_of(lr: "StepSize | None") -> list[Any]:
    """Return the numbers of all patterns and chains."""
    each = list(lr.values()) if isinstance(lr, Mapping) else [lr]
    return [number for value in each for number in (value if isinstance(value, Sequence) else [value])]


def is_per_chain(lr: "StepSize | None") -> bool:
    """Return whether a step size has a number for each of several chains."""
    each = lr.values() if isinstance(lr, Mapping) else [lr]
    return any(isinstance(value, Sequence) and len(value) > 1 for value in each)


def groups_by_pattern(
    parameters: Mapping[str, Tensor],
    lr: "Mapping[str, EachChain]",
    own_control: "Callable[[str, EachChain], Control]",
) -> list[dict[str, Any]]:
    """Return parameter groups, one for each pattern, whose name it is; a parameter's first one applies."""
    groups: dict[str, dict[str, Any]] = {}
    for pattern, value in lr.items():
        control = own_control(f"lr of '{pattern}'", value)
        groups[pattern] = {"params": [], "lr": control, "name": pattern}
    for name, parameter in parameters.items():
        first = next((pattern for pattern in lr if fnmatchcase(name, pattern)), None)
        if first is None:
            raise ValueError(f"lr has no pattern for the parameter '{name}': add one, or '*' for the rest")
        groups[first]["params"].append(parameter)
    check_patterns("lr", list(lr), parameters)
    return [group for group in groups.values() if group["params"]]
