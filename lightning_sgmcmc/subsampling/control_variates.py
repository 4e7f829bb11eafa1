"""Gradients and energies with less mini-batch noise, by control variates at a snapshot of the chains."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.chains.callback import ChainSizes, Place, Run, RunCost, SamplerCallback, refuse_loss_scaler
from lightning_sgmcmc.chains.chains import ChainModel, Chains
from lightning_sgmcmc.chains.densities import Densities, weighed
from lightning_sgmcmc.chains.execution import evaluation_mode, state_of, undisturbed_generators
from lightning_sgmcmc.chains.row_steps import ControlVariate
from lightning_sgmcmc.chains.schedule import is_warming_up
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import instances_of, is_logged, log_cost
from lightning_sgmcmc.checks import check_count, check_flag
from lightning_sgmcmc.evaluation.loader_average import HeldData, held_data
from lightning_sgmcmc.evaluation.passes import pass_over_data
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.tensors import as_rows, exact, exact_device


class Snapshot:
    """Parameters and buffers of all chains of this process at one time, θ_q, and if so wanted gradients there."""

    def __init__(self, chains: Chains, with_gradients: bool = False) -> None:
        module = chains.model
        self._chains = chains
        self._module = module
        self._densities = Densities(module)
        self._vmapped = chains.num_chains > 1 and chains.execution in ("auto", "vmap")
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._present().items()}
        self.log_likelihood = torch.zeros(chains.num_chains, dtype=torch.float64, device=exact_device(module.device))
        """log p(D|θ_q) of each chain over all data, shape (C,)."""
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and with_gradients}
        """The module's own tensors that have a gradient here."""
        self._sum_memory, self.sums = self._like_parameters()
        """The sum of the gradients added since `clear`, in the parameters' shapes."""
        self.count = 0
        """How many were added."""
        self._full_memory: Tensor | None = None
        self.full: list[Tensor] | None = None
        """The gradient of the mean negative log likelihood of all data, in the parameters' shapes, once it is kept."""
        self._states = self._make_states()

    def _present(self) -> dict[str, Tensor]:
        return {name: t for name, t in state_of(self._module).items() if name not in self._chains.sharing.names}

    def _like_parameters(self) -> tuple[Tensor, list[Tensor]]:
        """Return zeros in one piece of memory, and its parts in the parameters' shapes."""
        sizes = [p.numel() for p in self.parameters.values()]
        dtype = next((p.dtype for p in self.parameters.values()), None)
        memory = torch.zeros(sum(sizes), dtype=dtype, device=self._module.device)
        shapes = [p.shape for p in self.parameters.values()]
        return memory, [part.view(shape) for part, shape in zip(memory.split(sizes), shapes, strict=True)]

    def _make_states(self) -> list[dict[str, Tensor]]:
        """Return the tensors to compute with: of all chains at once, or of each; their gradients go into the sums."""
        chains, states = self._chains.num_chains, []
        whole = chains == 1 or self._vmapped
        places = {name: place for place, name in enumerate(self.parameters)}
        for chain in range(1 if whole else chains):
            state = {}
            for name, tensor in self.tensors.items():
                state[name] = (tensor if whole else tensor[chain]).detach()
                if name in places:
                    total = self.sums[places[name]]
                    state[name].requires_grad_().grad = total if whole else total[chain]
            states.append(state)
        return states

    def take(self) -> None:
        """Copy the chains' current states; results of a pass over the data become invalid."""
        layout = self._chains.layout
        with torch.no_grad():
            for name, tensor in self._present().items():
                # Ranks that share a chain have running statistics of their own, and the snapshot is one.
                is_buffer = not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
                averaged = layout.ranks_per_chain > 1 and is_buffer
                self.tensors[name].copy_(layout.mean_over_data(tensor.clone()) if averaged else tensor)
        self.clear()

    # -- the data at θ_q ----------------------------------------------------------------------------------------------

    def of_batch(self, batch: Any) -> Tensor:
        """Return log p(y|x,θ_q) of each datum of a mini-batch, shape (C, n), in evaluation mode."""
        module, own = self._module, isinstance(batch, ChainBatches)
        with torch.set_grad_enabled(bool(self.parameters)), evaluation_mode(module):
            if self._vmapped:
                stacked, axis = batch.stacked() if own else batch, 0 if own else None
                return self._densities.log_likelihoods(self._states[0], stacked, axis)
            each = enumerate(self._states)
            return torch.stack([self._densities.log_likelihood(s, batch[c] if own else batch) for c, s in each])

    def log_prior(self) -> Tensor:
        """Return log p(θ_q) of each chain, shape (C,)."""
        states = self._states
        with torch.set_grad_enabled(bool(self.parameters)):
            if self._vmapped:
                states = [{name: t[c] for name, t in states[0].items()} for c in range(self._chains.num_chains)]
            return torch.stack([self._densities.log_prior(state) for state in states])

    def add_gradients(self, log_density: Tensor, divisor: float) -> None:
        """Add the gradients of each chain's -Σ_i log_density_i/divisor to the sums; the densities' graph is used up."""
        (-log_density.sum() / divisor).backward()  # type: ignore[no-untyped-call]
        self.count += 1

    def reduce(self) -> None:
        """Replace the sums by their mean over the ranks that share the chains' data."""
        if self._chains.layout.ranks_per_chain > 1:
            self._sum_memory.copy_(self._chains.layout.mean_over_data(self._sum_memory))

    def keep_full(self) -> None:
        """Take the sums, of this rank's share of all data over N each, for the gradient of all data."""
        self.reduce()
        if self._full_memory is None:
            self._full_memory, self.full = self._like_parameters()
        torch.mul(self._sum_memory, self._chains.layout.ranks_per_chain, out=self._full_memory)
        self.clear()

    def clear(self) -> None:
        """Reset the sums."""
        self._sum_memory.zero_()
        self.count = 0

    def control_variate(self, energy: bool, end: Callable[[int], None]) -> ControlVariate:
        """Return the snapshot as rows for steps that are made at once, see `ControlVariate`."""
        chains = self._chains
        assert chains.flat is not None
        known = {id(tensor): name for name, tensor in chains.trainable.items()}
        names = [known[id(parameter)] for parameter in chains.flat.parameters]
        full = None if self.full is None else dict(zip(self.parameters, self.full, strict=True))
        return ControlVariate(
            rows_of([self.tensors[name] for name in names], chains.num_chains),
            {name: tensor for name, tensor in self.tensors.items() if name not in names},
            None if full is None else rows_of([full[name] for name in names], chains.num_chains),
            self.log_likelihood / chains.observed.num_data if energy else None,
            end,
        )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of all chains of the run."""
        layout = self._chains.layout

        def stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: layout.gather_stored(tensor).cpu().clone() for name, tensor in tensors.items()}

        state = {"tensors": stored(self.tensors), "log_likelihood": layout.gather(self.log_likelihood).cpu().clone()}
        if self.full is not None:
            state["full"] = stored(dict(zip(self.parameters, self.full, strict=True)))
        if self.count:
            state["count"] = self.count
            sums = zip(self.parameters, self.sums, strict=True)
            state["sums"] = {name: layout.gather_unreduced(tensor).cpu().clone() for name, tensor in sums}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        layout = self._chains.layout
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(layout.own_stored(tensor))
        self.log_likelihood.copy_(layout.own(state["log_likelihood"]))
        self.clear()
        if "full" in state and self.parameters:
            self._full_memory, self.full = self._like_parameters()
            for name, tensor in zip(self.parameters, self.full, strict=True):
                tensor.copy_(layout.own_stored(state["full"][name]))
        if "sums" in state and self.parameters:
            self.count = state["count"]
            for name, tensor in zip(self.parameters, self.sums, strict=True):
                tensor.copy_(layout.own_unreduced(state["sums"][name]))


def rows_of(tensors: Sequence[Tensor], num_chains: int, out: Tensor | None = None) -> Tensor:
    """Return tensors of C chains as one row for each chain, shape (C, d)."""
    parts = [as_rows(tensor, num_chains) for tensor in tensors]
    return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)


class SnapshotCallback(SamplerCallback):
    """Base class for callbacks that compare mini-batches with a snapshot θ_q of the chains.

    It takes the snapshot at the beginning of every q-th epoch, and of an epoch with other data, by a pass over all
    data. It also evaluates each mini-batch at θ_q: its energy, its gradient, or both from the same forward pass.
    """

    changes_chain = True
    place = Place.CHAIN

    shuffles_pass = False
    """Whether a pass over all data uses random batches."""

    def __init__(self, start_epoch: int, every_n_epochs: int, energy: bool, gradients: bool) -> None:
        check_count("start_epoch", start_epoch, least=0)
        check_count("every_n_epochs", every_n_epochs)
        check_flag("energy", energy)
        self.start_epoch = start_epoch
        self.every_n_epochs = every_n_epochs
        self.energy = energy
        self.needs_gradients = gradients
        self.reset()

    def reset(self) -> None:
        self._snapshot: Snapshot | None = None
        self._period = -1
        """The index of the snapshot, -1 before the first one."""
        self._num_data = 0
        """N of the snapshot."""
        self._held: HeldData | None = None
        """The training data of the snapshot."""
        self._correction: Tensor | None = None
        """The correction of this step's energies, the mean over its micro-batches so far."""
        self._variate: ControlVariate | None = None
        """The snapshot for steps that are made at once."""
        self._made = 0
        """The last of the sampler's steps that were made at once with it."""

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        claims = module.chains.claims
        if self.needs_gradients:
            refuse_loss_scaler(trainer, f"{type(self).__name__} computes with gradients")
            claims.claim("snapshot gradients", self, self._batch_is_complete)
        if self.energy:
            claims.claim("energy correction", self, self._correction_of)

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        if saved is None:
            return
        if saved["snapshot"] is not None:
            self._snapshot = Snapshot(run.chains, self.needs_gradients)
            self._snapshot.load_state_dict(saved["snapshot"])
        self._period = saved["period"]
        self._num_data = saved.get("num_data", run.chains.observed.num_data)
        self._held = held_data(run.trainer)  # data that change during a run are part of the checkpoint
        if saved["correction"] is not None:
            correction = run.layout.own_unreduced(saved["correction"]).reshape(-1)
            self._correction = correction.to(exact_device(run.module.device))

    # -- the snapshot -------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Return whether the coming step needs no snapshot."""
        return False

    def process_batch(self, snapshot: Snapshot, log_likelihood: Tensor) -> None:
        """Process log p(y|x,θ_q), shape (C, n), of a batch of all data, with its graph if gradients are computed."""

    def end_pass(self, snapshot: Snapshot) -> None:
        """Combine the results of the pass over all data."""

    def _refresh(self, trainer: pl.Trainer) -> None:
        """Take a snapshot of the chains, and pass over all data."""
        module = self.run.module
        if self._snapshot is None:
            self._snapshot = Snapshot(self.run.chains, self.needs_gradients)
        snapshot, self._variate = self._snapshot, None
        snapshot.take()
        total = torch.zeros_like(snapshot.log_likelihood)
        with undisturbed_generators(module):
            reason, sampler = type(self).__name__, module.sampler
            for batch in pass_over_data(trainer, module.chains, sampler, reason, "snapshot", self.shuffles_pass):
                each = self._at_snapshot(trainer, snapshot, batch)
                total += exact(each.detach()).sum(1)
                self.process_batch(snapshot, each)
        ranks = self.run.layout.ranks_per_chain
        snapshot.log_likelihood.copy_(self.run.layout.mean_over_data(total) * ranks)
        self.end_pass(snapshot)
        if self.needs_gradients:
            self.run.chains.counters.gradient_evaluations += self.run.chains.observed.num_data

    @staticmethod
    def _at_snapshot(trainer: pl.Trainer, snapshot: Snapshot, batch: Any) -> Tensor:
        with trainer.strategy.precision_plugin.val_step_context():
            return snapshot.of_batch(batch)

    def memory(self, sizes: ChainSizes) -> int:
        return sizes.tensors

    def added_gradients(self, cost: RunCost) -> int | None:
        if not self.needs_gradients:
            return 0
        share = max(cost.epochs - self.start_epoch, 0.0)
        if math.isnan(share):
            return None
        return round(cost.gradients * share / cost.epochs + math.ceil(share / self.every_n_epochs) * cost.num_data)

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since < 0 or is_warming_up(trainer, self.run.module, batch_idx) or self.is_idle():
            return
        if self.run.sampler.step_count < self._made:
            return
        position = batch_idx % trainer.accumulate_grad_batches
        if position == 0 and self._is_due(batch_idx):
            self._refresh(trainer)
            self._period, self._num_data = self._present
            self._held = held_data(trainer)
        if self._snapshot is None:
            return
        each = self._at_snapshot(trainer, self._snapshot, batch)
        weights = self.run.chains.weights
        factor = None if weights is None else weights.factor(batch_idx, self.run.chains.accumulation.candidates)
        if self.needs_gradients:
            size = each.shape[1]
            self._snapshot.add_gradients(each, size if factor is None else 1 / factor)
            self.run.chains.counters.gradient_evaluations += size * self.run.layout.ranks_per_chain
        if self.energy:
            self._correct_energy(self._snapshot, each.detach(), position, factor)

    @property
    def _since(self) -> int:
        """Epochs since the first one that is corrected, below 0 before."""
        return self.run.trainer.current_epoch - self.start_epoch

    @property
    def _present(self) -> tuple[int, int]:
        """The present snapshot's index and N, once it is taken."""
        return self._since // self.every_n_epochs, self.run.chains.observed.num_data

    def _is_due(self, batch_idx: int) -> bool:
        """Return whether a snapshot is to be taken before a batch: the first of an epoch may be of data that were
        replaced by others of the same number."""
        is_old = batch_idx == 0 and self._held is not None and not self._held.is_same(held_data(self.run.trainer))
        return is_old or self._present != (self._period, self._num_data)

    def acts_in(self, step: int) -> bool:
        if self._since < 0:
            return False
        is_unknown = self._snapshot is None or self.run.chains.progress.stage is Stage.WARM_START
        ahead = step - self.run.sampler.step_count
        return is_unknown or self._is_due(self.run.trainer.fit_loop.batch_idx + ahead)

    def step_variate(self) -> ControlVariate | None:
        if self._since < 0 or self._snapshot is None:
            return None
        if self._variate is None:
            self._variate = self._snapshot.control_variate(self.energy, self._end_steps)
        return self._variate

    def _end_steps(self, steps: int) -> None:
        """Note steps that were made at once; Lightning may yet see the last of them."""
        self._made = self.run.sampler.step_count + steps

    def _correct_energy(self, snapshot: Snapshot, each: Tensor, position: int, factor: float | None) -> None:
        observed = self.run.chains.observed
        observed.reference_log_likelihood = each
        correction = self._term(snapshot, each, factor)
        if position > 0 and self._correction is not None:
            correction = self._correction + (correction - self._correction) / (position + 1)
        self._correction = observed.correction = correction

    def _term(self, snapshot: Snapshot, each: Tensor, factor: float | None) -> Tensor:
        """Return what is added to the energies of a batch, shape (C,), from its log likelihoods at the snapshot."""
        return self.run.chains.observed.num_data * weighed(exact(each), factor) - snapshot.log_likelihood

    def _correction_of(self, batch: Any, factor: float | None) -> Tensor:
        """Return what is added to the energies of any batch, shape (C,), with the factor of its log-likelihoods."""
        snapshot = self._snapshot
        if snapshot is None:
            module = self.run.module
            return torch.zeros(module.num_chains, dtype=torch.float64, device=exact_device(module.device))
        return self._term(snapshot, self._at_snapshot(self.run.trainer, snapshot, batch).detach(), factor)

    def _batch_is_complete(self) -> None:
        if self._snapshot is not None and self._snapshot.count > 0:
            with torch.no_grad():
                self.correct_gradient(self._snapshot)
            self._snapshot.clear()

    def correct_gradient(self, snapshot: Snapshot) -> None:
        """Process the gradient of a whole batch: the parameters hold it, times `batch_share`, and the snapshot the sum
        of its micro-batches' there."""

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def end(self) -> None:
        self._snapshot = self._held = self._variate = None

    def state(self) -> dict[str, Any]:
        snapshot, correction = self._snapshot, None
        if self._run is not None and self._correction is not None and self.run.chains.accumulation.accumulating:
            own = self._correction if self.run.module.num_chains > 1 else self._correction[0]
            correction = self.run.layout.gather_unreduced(own).cpu()
        return {
            "snapshot": snapshot.state_dict() if snapshot is not None else None,
            "period": self._period,
            "num_data": self._num_data,
            "correction": correction,
        }


class ControlVariates(SnapshotCallback):
    """Reduces the mini-batch noise of the gradient by a control variate.

        g ← g - (1/n)·Σ_{i in batch} ∇U_i(θ_q) + (1/N)·Σ_i ∇U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as g, and less
    noise the nearer θ_q is; the prior's gradient is exact anyway. It works with any sampler: with `SGLD` it is
    SVRG-LD, with `SGHMC` its version with momentum. Each chain has its own snapshot. With `EWSG` each candidate's
    gradient is corrected.

    Each snapshot costs a full-data gradient, and each batch its gradient there, so a step costs about twice as
    much. Every `trainer.log_every_n_steps` it logs `sampler/gradient_evaluations` (per-datum gradients, for each chain)
    and `sampler/data_passes`, that number over N. Clipping applies to the corrected gradient.

    The snapshot is computed in evaluation mode: dropout is off, and BatchNorm uses the running statistics at θ_q, so
    that U_i(θ_q) is a function of one datum. The mean of g is unchanged, but so is its noise from dropout, and with
    BatchNorm, whose statistics in g are the batch's, much of the mini-batch noise. If training data are augmented, the
    sum over all data uses one draw of the augmentation, so until the next snapshot the mean of g has that draw's
    error.

    Args:
        start_epoch: first epoch, from 0, in which gradients are corrected.
        every_n_epochs: q.
        energy: also correct the energies, as `VarianceReducedEnergy` does, from the same snapshot and forward passes.

    Raises:
        ValueError: for an argument out of range; at setup, for a loss scaler or a `VarianceReducedEnergy`.

    Source: Dubey et al. 2016 (Variance reduction in stochastic gradient Langevin dynamics), Algorithm 2; Baker et al.
    2019 (Control variates for stochastic gradient MCMC).
    """

    setting = "control_variates"

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 1, energy: bool = False) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=energy, gradients=True)

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        super().check(trainer, module)
        if instances_of(trainer, VarianceReducedEnergy):
            raise ValueError(
                "ControlVariates and VarianceReducedEnergy would each take a snapshot and pass over all data: use "
                "ControlVariates(energy=True), which corrects both from one snapshot"
            )

    def memory(self, sizes: ChainSizes) -> int:
        return super().memory(sizes) + 2 * sizes.parameters  # the gradients of a batch and of all data

    def process_batch(self, snapshot: Snapshot, log_likelihood: Tensor) -> None:
        snapshot.add_gradients(log_likelihood, self.run.chains.observed.num_data)

    def end_pass(self, snapshot: Snapshot) -> None:
        snapshot.keep_full()

    def correct_gradient(self, snapshot: Snapshot) -> None:
        assert snapshot.full is not None
        snapshot.reduce()
        share = self.run.chains.accumulation.batch_share
        rows = zip(snapshot.parameters.values(), snapshot.sums, snapshot.full, strict=True)
        present = [(p.grad, batch, full) for p, batch, full in rows if p.grad is not None]
        gradients, batches, fulls = ([row[place] for row in present] for place in range(3))
        torch._foreach_add_(gradients, batches, alpha=-share / snapshot.count)  # first, to cancel exactly
        torch._foreach_add_(gradients, fulls, alpha=share)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logged(trainer, self.run.chains, self.run.sampler.step_count):
            log_cost(trainer, self.run.chains)


class VarianceReducedEnergy(SnapshotCallback):
    """Reduces the mini-batch noise of the energy by a control variate.

        Ũ_VR(θ) = Ũ(θ) - (N/n)·Σ_{i in batch} U_i(θ_q) + Σ_i U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as Ũ, and
    less noise the nearer θ_q is. `ContourGradient` and `ReplicaExchange` use this energy instead of Ũ; gradients are
    unchanged (`ControlVariates` corrects gradients, and also energies from the same snapshot). Each chain has its own
    snapshot. Each snapshot costs a pass over all data, and each step a forward pass at the snapshot; both run in
    evaluation mode, with the training data's augmentation.

    Args:
        start_epoch: first epoch, from 0, in which energies are corrected.
        every_n_epochs: q.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2022 (ICSGLD), appendix B.1; Deng et al. 2021 (variance-reduced replica exchange).
    """

    setting = "variance_reduced_energy"

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 2) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=True, gradients=False)
