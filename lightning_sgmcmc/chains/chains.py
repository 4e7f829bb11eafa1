"""What a module with several chains is, beside one network: stacked storage, starts, gradients, samples."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_sgmcmc.chains.energies import ChainEnergies
from lightning_sgmcmc.chains.layout import ChainLayout, layout_of
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.stacked import StackedChains, clip_each_chain
from lightning_sgmcmc.chains.starts import draw_start
from lightning_sgmcmc.chains.state import ChainState
from lightning_sgmcmc.finite import bad_tensor
from lightning_sgmcmc.run.guard import EnergyGuard
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed, reseed


class ChainModule(pl.LightningModule):
    """The base of `BayesianModule`: whatever concerns chains and not the model.

    A module with one chain in its process is an ordinary one. With more, every parameter and buffer gets a leading
    chain axis when a fit begins (see `StackedChains`).
    """

    num_chains: int
    chain_start: Literal["own", "same"]
    chain_state: ChainState
    _guard: EnergyGuard | None
    _sampling_seed: int | None
    _trainable: dict[str, Tensor] | None

    def __init__(self) -> None:
        super().__init__()
        self._started: range | None = None
        self._chains: StackedChains | None = None
        self._layout = ChainLayout()
        self._energies: ChainEnergies | None = None

    @property
    def sampler(self) -> Sampler:
        """The sampler of the running fit."""
        raise NotImplementedError

    def _resolve_seed(self) -> int:
        raise NotImplementedError

    # -- storage and starts -------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Stack the chains, once; a subclass that defines its layers here calls this one at its end."""
        trainer = self._trainer
        self._layout = layout_of(trainer, self.num_chains)
        own_start = any(chain > 0 for chain in self._layout.chains) and self.chain_start == "own"
        if self._started is not None:
            if self._started != self._layout.chains:
                rank_zero_warn(
                    "This module's chains began in another layout, so chains of several processes go on from the same "
                    "states here: make a new module for a run of several processes."
                )
            return
        if not (self.num_chains > 1 or own_start):
            return
        self._check_layers()
        self._sampling_seed = self._resolve_seed()
        self._started = self._layout.chains
        if self.num_chains > 1:
            self._chains = StackedChains(self, self.num_chains, self._initialise)
        else:
            with torch.no_grad():
                self._initialise(0)

    def _initialise(self, index: int) -> None:
        """Put the start of the chain with this index in this process in place."""
        chain = self._layout.chains[index]
        if chain == 0 or self.chain_start == "same":
            return
        with torch.random.fork_rng([]):
            reseed(derive_seed(self._sampling_seed or 0, "start", chain))
            self.initialise_chain(chain)

    def initialise_chain(self, chain: int) -> None:
        """Draw the start of a chain into the module's own tensors; override it for starts of another kind.

        A subclass's constructor is called again with the same arguments; what it does not make anew, a network that was
        handed over, is started by its layers' `reset_parameters`. Frozen parameters stay.

        Args:
            chain: global index of the chain, from 1; torch's default generator is seeded by it.
        """
        cls, arguments = type(self), self.__dict__["_arguments"]
        own_constructor = cls.__bases__ != (ChainModule,)
        rebuild = (lambda: cls(**arguments)) if own_constructor else None
        kept = draw_start(self, rebuild)
        if kept and chain == 1:
            warnings.warn(  # also where chain 1 is in another process than the first
                f"All chains start with the same {', '.join(map(repr, kept))}: the layer has no reset_parameters. "
                f"Define initialise_chain(chain) of {cls.__name__}, or pass chain_start='same'.",
                stacklevel=2,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned, of one network or of stacked chains; the latter stacks them here too."""
        if self.num_chains > 1 and self._chains is None:
            own = {name: parameter.dim() for name, parameter in self.named_parameters()}
            if any(state_dict[name].dim() == dim + 1 for name, dim in own.items() if name in state_dict):
                self.configure_model()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @contextmanager
    def at_chain(self, chain: int) -> Iterator[None]:
        """Put the network of one chain in place: inside, the module is that chain's ordinary network.

        Args:
            chain: its index in this process, from 0.

        Raises:
            IndexError: if there is no such chain.
        """
        if not 0 <= chain < self.num_chains:
            raise IndexError(f"chain must be between 0 and {self.num_chains - 1}, got {chain}")
        if self._chains is None:
            yield
            return
        with self._chains.at(chain):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chains = self.__dict__["_chains"]
        # A data-parallel wrapper calls the training step by way of a `forward` of its own.
        if chains is not None and chains.is_at_rest and "forward" not in self.__dict__:
            raise RuntimeError(
                f"{type(self).__name__} holds {self.num_chains} chains, and an output is of one: call it in `with "
                "module.at_chain(c):`, or average over samples by module.posterior.predict(x)"
            )
        return super().__call__(*args, **kwargs)

    @property
    def layout(self) -> ChainLayout:
        """Which chains this process holds."""
        return self._layout

    @property
    def chains(self) -> StackedChains | None:
        """The stacked chains, None where this process holds one plain chain."""
        return self._chains

    def chain_with(self, name: str) -> int:
        """Return the global index of the first chain whose tensor `name` is not finite."""
        tensor = dict(self.named_parameters()) | dict(self.named_buffers())
        rows = tensor[name].reshape(self.num_chains, -1)
        return self._layout.chains[int((~rows.isfinite()).any(1).byte().argmax())]

    def _of_chains(self, name: str, value: float | Sequence[float]) -> "float | Tensor":
        """Return a control: a number for all chains, or this process's chains' own as a tensor."""
        if isinstance(value, int | float):
            return value
        total = self._layout.total_chains
        if len(value) != total:
            raise ValueError(f"{name} has {len(value)} values, and the run has {total} chains: give one for each")
        own = torch.tensor([value[chain] for chain in self._layout.chains], device=self.device)
        return own if len(own) > 1 else own.item()

    def _check_layers(self) -> None:
        for name, parameter in self.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise ValueError(
                    f"'{name}' has no shape yet, since its layer is lazy: pass one batch through "
                    f"{type(self).__name__} first"
                )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Make the backward pass; gather the chains' gradients, and correct them, once a batch's are complete."""
        loss.backward(*args, **kwargs)
        state: ChainState = self.__dict__["chain_state"]
        if not state.batch_complete:
            return
        energies: ChainEnergies | None = self.__dict__["_energies"]
        collects = energies is not None and energies.collects
        if collects:
            self.__dict__["_chains"].collect_gradients()
        if state.correct_gradient is not None:
            state.correct_gradient()
            if collects and state.accumulating:
                self.__dict__["_chains"].spread_gradients()  # where the next batch's gradients are added to these

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients, the chains' own too."""
        optimizer.zero_grad()
        chains: StackedChains | None = self.__dict__["_chains"]
        if chains is not None:
            chains.clear_gradients()
        if self.__dict__["_energies"] is not None:
            self.__dict__["_energies"].keep_gradients(self.parameters())

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient of each chain by its own norm."""
        if self._chains is None or not gradient_clip_val or gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        clip_each_chain([p.grad for p in self.parameters() if p.grad is not None], float(gradient_clip_val))

    # -- samples ------------------------------------------------------------------------------------------------------

    def posterior_samples(self) -> Iterator[PosteriorSample]:
        """Return the chains' present states as samples, one for each chain of the run in their order, made one after
        the other with tensors of their own; all processes go through them together."""
        state = self.chain_state
        frozen = next((name for name, p in (self._trainable or {}).items() if not p.requires_grad), None)
        if frozen is not None:
            raise RuntimeError(
                f"'{frozen}' was frozen in the middle of the run, so this state is no sample of the posterior: freeze "
                "parameters before the fit"
            )
        if state.before_sample is not None:
            state.before_sample()
        energy = state.sample_energy
        if energy is None:
            energy = self._layout.mean_over_data(state.energy)
        layout = self._layout
        samples = self._own_samples(energy)
        everyone = layout.strategy.share_samples(samples, self.num_chains) if layout.is_spread else samples
        for sample in everyone:
            if state.labels is not None:
                sample.chain = state.labels[sample.chain]
            if sample.chain in state.sampled:
                yield sample

    def _own_samples(self, energy: Tensor) -> Iterator[PosteriorSample]:
        """Yield the samples of this process's chains.

        Args:
            energy: their energies, shape (C,).
        """
        state, layout = self.chain_state, self._layout
        energies, log_weights = energy.reshape(-1).tolist(), state.log_weight.reshape(-1).tolist()
        bins = state.bin.reshape(-1).tolist() if state.bin is not None else [None] * self.num_chains
        for index, chain in enumerate(layout.chains):
            with self.at_chain(index):
                parameters = {name: p.detach().clone() for name, p in self.named_parameters()}
                buffers = {name: b.detach().clone() for name, b in self.named_buffers()}
            bad = bad_tensor(parameters, buffers)
            if bad is not None and self._guard is not None:
                raise self._guard.state_error(bad, "it is no sample", chain)
            yield PosteriorSample(
                step=self.sampler.step_count,
                cycle=state.cycle,
                chain=chain,
                energy=energies[index],
                log_weight=log_weights[index],
                bin=bins[index],
                parameters=parameters,
                buffers=buffers,
            )
