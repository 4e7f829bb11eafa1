"""Sampling in a training loop of one's own: plain torch, Fabric, accelerate, or the trainer of transformers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.inputs import next_tokens, unwrapped
from lightning_sgmcmc.chains.samples import PosteriorSample, checksum, rounded
from lightning_sgmcmc.chains.schedule import RunLength, Schedule
from lightning_sgmcmc.chains.starts import Sharing
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.checks import check_count, check_flag, check_kind
from lightning_sgmcmc.expansion import collapsed
from lightning_sgmcmc.files import local_path
from lightning_sgmcmc.likelihoods import Likelihood, TokenCategorical
from lightning_sgmcmc.model import EnergyModel, check_model, check_shape, named_trainable
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior.description import description_for_store
from lightning_sgmcmc.posterior.disk import DiskStore, begin_store, check_same_dtype, continue_store
from lightning_sgmcmc.posterior.lock import StoreLock
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.store import MemoryStore, Narrow, SampleStore, narrow_dtype
from lightning_sgmcmc.priors import HierarchicalPrior, Prior
from lightning_sgmcmc.priors.state import held_rows, is_prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.tensors import bad_tensor, mean_of

FEW, MOST_LOOKS = 8, 64
"""First steps whose gradients are looked at for clipping, beside those before a sample, and the most of all."""
MOST_DATA = "most_data"
"""Entry of a parameter group: the most data of a step so far."""
ALIKE = 1e-5
"""Relative difference of norms of clipped gradients."""


class SampleWriter:
    """Makes a sampling run of a training loop: at each `sampler.step()` it adds the prior to the gradients, sets the
    schedule's step size and temperature, and stores the samples that are due.

        g ← g - ∇log p(θ)/N,   where the loop's loss has the gradient g of the mean of -log p(y|x,θ) over a batch

    The loop stays as it is, but for its loss, `writer.loss(output, target)`. N is the sampler's `num_data`, and the
    number of its step is its own counter, so a loop that restores the sampler's state goes on where it was: samples
    drawn after that step are moved aside. In a loop on several processes each has a writer with the same arguments; the
    first one writes.

    Args:
        net: the network that the loop trains, before a wrapper (DDP, `fabric.setup`, `accelerator.prepare`).
        likelihood: p(y | output).
        prior: log p(θ) over the sampler's parameters; a number is the standard deviation of a `GaussianPrior`, and None
            is 1. It is told here alone: the loss and the sampler have no weight decay.
        sampler: the optimizer of the loop, of one chain, or what a framework has made of it. It has the parameters of
            the network, and of a likelihood that learns its noise.
        schedule: a `CyclicalSchedule`, a `SamplingSchedule` or a `Schedule` of your own.
        steps: optimizer steps of the loop, K.
        dirpath: folder of the samples, which `Posterior.load` reads; None stores them in memory. Samples of an earlier
            loop are moved aside.
        steps_per_epoch: optimizer steps of an epoch, M, for schedules in epochs, and for a short last batch: the
            gradient of n data is multiplied by n·M/N, so that all data weigh the same. 0 if unknown.
        chain: the chain's number, for loops that each sample one chain into a folder of its own.
        own_loss: whether the loop has a loss of its own, which must be the mean of -log p(y|x,θ) over a batch, in nats.
            Energies are then unknown (NaN).
        dtype: "bfloat16" or "float16" stores float32 parameters in half the bytes, see `Posterior.save`; None stores
            them as they are.

    Raises:
        TypeError: if an argument has the wrong type, or the schedule needs Lightning's trainer.
        ValueError: for an argument out of range, a sampler without num_data or with other parameters than the model's,
            or a schedule that draws no sample; with a dtype, if a parameter is not float32; in a step, if the loss is
            not the writer's, or if the folder to go on in has another dtype.
        NonFiniteEnergyError: if a sample has NaN or infinite numbers.

    Example::

        net, x, y = torch.nn.Linear(4, 3), torch.randn(60, 4), torch.randint(3, (60,))
        sampler = SGHMC(net.parameters(), lr=0.1, num_data=60)
        writer = SampleWriter(net, Categorical(), 0.3, sampler=sampler, schedule=CyclicalSchedule(), steps=100)
        for _ in range(100):
            rows = torch.randperm(60)[:20]
            sampler.zero_grad()
            writer.loss(net(x[rows]), y[rows]).backward()
            sampler.step()
        prediction = writer.posterior.predict(x)
    """

    _is_replaced = False
    """Whether a later writer of this process has taken the folder."""

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | float | None = None,
        *,
        sampler: Any,
        schedule: Schedule,
        steps: int,
        dirpath: str | Path | None = None,
        steps_per_epoch: int = 0,
        chain: int = 0,
        own_loss: bool = False,
        dtype: str | None = None,
    ) -> None:
        if isinstance(net, EnergyModel):
            raise TypeError(
                f"net is a {type(net).__name__}, which has a likelihood and a prior of its own: pass its network, or "
                "fit it with a Trainer"
            )
        check_kind("schedule", schedule, Schedule)
        if schedule.needs_trainer:
            raise TypeError(
                f"{type(schedule).__name__} needs Lightning's trainer: pass a CyclicalSchedule or a SamplingSchedule"
            )
        check_count("steps", steps, optional=False)
        check_count("steps_per_epoch", steps_per_epoch, least=0, optional=False)
        check_count("chain", chain, least=0, optional=False)
        check_flag("own_loss", own_loss)
        self.sampler = _sampler_in(sampler)
        if self.sampler.num_data is None or self.sampler.num_chains > 1:
            fault = "no num_data, by which the prior is divided" if self.sampler.num_data is None else "several chains"
            remedy = "pass num_data=N" if self.sampler.num_data is None else "write a loop for each chain"
            raise ValueError(f"the sampler has {fault}: {remedy}, or fit a BayesianModule with a Trainer")
        self._num_data = self.sampler.num_data
        self.model = BayesianModule(net, likelihood, prior, num_data=self.sampler.num_data)
        check_model(self.model)
        if isinstance(self.model.prior, HierarchicalPrior):
            raise TypeError("the scales of a HierarchicalPrior are drawn by Lightning's trainer: pass a GaussianPrior")
        self.schedule, self.steps, self.steps_per_epoch = schedule, steps, steps_per_epoch
        self.chain, self.own_loss = chain, own_loss
        self._path = None if dirpath is None else local_path(dirpath, "dirpath", "pass a local folder")
        self._store: SampleStore | None = None
        self._lock: StoreLock | None = None
        self._loss: Tensor | None = None
        """The sum of -log p(y|x,θ) over the step's data so far, then the mean that its gradient is of."""
        self._log_prior = torch.zeros(())
        self._seen = self._of_step = 0
        """Data whose loss was computed since the first step, and in this step."""
        self._first = self._coming = 0
        """The first step with this writer, and the one that is being made."""
        self._ranks = [0]
        """The processes that sample the chain; the first one writes."""
        self._is_alone = True
        """Whether the loop has one process."""
        self._has_gradients = False
        """Whether a loss since the last one was differentiated."""
        self._said_short = False
        self._norms: list[float] = []
        self._lr: Any = None
        """The step size of the last step."""
        self._check_parameters()
        self._narrow = None if (name := narrow_dtype(dtype)) is None else Narrow(name)
        if self._narrow is not None:
            self._narrow.check(named_trainable(self.model))
        self.model.configure_model()  # a prior's tensors, such as a centre
        self.model.prior.check_names(named_trainable(self.model).keys())
        self._sharing = Sharing(self.model)
        self._sharing.begin()
        for group in self.sampler.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._lr = self.sampler.param_groups[0]["initial_lr"]
        target = schedule.temperature
        self._target = self.sampler.param_groups[0]["temperature"] if target is None else target
        schedule.lay_out(RunLength(steps, steps_per_epoch, self.sampler.param_groups[0]["initial_lr"]))
        schedule.check_sampler(self.sampler, self._target)
        self._hooks = [
            self.sampler.register_step_pre_hook(self._before),
            self.sampler.register_step_post_hook(self._after),
        ]

    def loss(self, output: Any, target: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Return the mean of -log p(y|x,θ) over a batch, in nats, shape (): the loss whose gradient the loop takes.

        It is also a `compute_loss_func` of the trainer of transformers.

        Args:
            output: the network's output, or an object with `logits`.
            target: the targets, as the likelihood takes them.
            num_items_in_batch: the number of labels in all batches of the step, by which that trainer divides.

        Raises:
            ValueError: at the first call, for a target that the likelihood has no density for; or if data have several
                labels and a step several batches.
        """
        likelihood: Any = self.model.likelihood
        output = unwrapped(output)
        output = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        if isinstance(likelihood, TokenCategorical) and self.model.accepted_arguments.shifts_labels:
            target = next_tokens(target, None, likelihood.ignore_index)
        if self._first == 0 and self._loss is None:
            likelihood.check_target(output.detach(), target)
        log_prob = likelihood.log_prob(output, target)
        check_shape(log_prob)
        data, mean = len(log_prob), -log_prob.mean()
        if mean.requires_grad:  # not for validation
            self._count(data, mean)
        if num_items_in_batch is None:
            return mean
        if target.dim() > 1 and int(num_items_in_batch) != int((target != -100).sum()):
            raise ValueError(
                "a step has several batches, whose data have several labels each, so the mean over data is unknown: "
                "pass gradient_accumulation_steps=1"
            )
        return mean if target.dim() > 1 else mean * (data / num_items_in_batch)

    def _count(self, data: int, mean: Tensor) -> None:
        """Add a batch to the coming step, which begins anew where a loss scaler has left one out."""
        parameters = (p for group in self.sampler.param_groups for p in group["params"])
        if self._has_gradients and all(p.grad is None for p in parameters):
            self._loss, self._seen, self._of_step = None, self._seen - self._of_step, 0
        self._has_gradients = False
        self._seen, self._of_step = self._seen + data, self._of_step + data
        added = mean.detach() * data
        self._loss = added if self._loss is None else self._loss + added
        mean.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        self._has_gradients = True

    @property
    def posterior(self) -> Posterior:
        """The samples so far.

        Raises:
            RuntimeError: before the first step.
        """
        if self._path is not None and (self._path / MANIFEST).exists():
            return Posterior(DiskStore(self._path), self.model)
        if self._store is None:
            raise RuntimeError("there are no samples yet, since the sampler has made no step with this writer")
        return Posterior(self._store, self.model)

    def close(self) -> None:
        """Leave the sampler, and release the folder; the last of `steps` does so too."""
        for hook in self._hooks:
            hook.remove()
        if self._lock is not None:
            self._lock.release()

    # -- a step -------------------------------------------------------------------------------------------------------

    def _before(self, sampler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare a step; with a closure, its gradients come later."""
        self._coming = self.sampler.step_count + 1
        if self._is_replaced:
            raise RuntimeError(
                f"a later SampleWriter of this process writes to {self._path}, so this one has ended: pass another "
                "dirpath"
            )
        if self._store is None:
            self._begin()
        else:
            self._check_lr()
        self.schedule.set_controls(self._coming, self.sampler, self._target)
        self._lr = self.sampler.param_groups[0]["lr"]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._end_gradient()
            return None
        return (args[0], self._with_prior(closure)), {}

    def _with_prior(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def with_prior() -> Any:
            loss = closure()
            self._end_gradient()
            return loss

        return with_prior

    def _end_gradient(self) -> None:
        """Add the prior's gradient to the loss's."""
        if self._loss is None and not self.own_loss:
            raise ValueError(
                "the loop's loss is not `writer.loss(output, target)`, so whether it is the mean of -log p(y|x,θ) is "
                "unknown: use that, or pass own_loss=True if your own is equal to it"
            )
        parameters = [p for group in self.sampler.param_groups for p in group["params"] if p.requires_grad]
        self._look_for_clipping(parameters)
        share = self._share_of_step()
        if share != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], share)
        self._loss = None if self._loss is None else self._loss * (share / self._of_step)
        with torch.enable_grad():
            log_prior = self.model.log_prior()
            found = torch.autograd.grad(log_prior, parameters, allow_unused=True) if log_prior.requires_grad else ()
        self._log_prior = log_prior.detach()
        for parameter, gradient in zip(parameters, found, strict=False):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if gradient is not None:
                parameter.grad.add_(gradient.to(parameter.grad), alpha=-1 / self._num_data)

    def _share_of_step(self) -> float:
        """Return the data of the step over those of an epoch's mean step."""
        group = self.sampler.param_groups[0]  # which the loop's checkpoints hold
        data, most = self._of_step, max(group.get(MOST_DATA, 0), self._of_step)
        if data < most and not self.steps_per_epoch and not self._said_short:
            self._said_short = True
            rank_zero_warn(
                f"Step {self._coming} has {data} data and an earlier one {most}, whose mean gradients weigh their data "
                "differently: pass steps_per_epoch=…, or a loader with drop_last=True."
            )
        group[MOST_DATA] = most
        if self.own_loss or not self.steps_per_epoch:
            return 1.0
        mean = self._num_data / len(self._ranks) / self.steps_per_epoch
        # Where the largest batches do not make N, the loop leaves out the last one.
        return data / mean if mean <= most else 1.0

    def _after(self, sampler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the sample of a step, if one is due."""
        step = self._coming
        if self.sampler.step_count != step:
            return  # the update was not made
        if step == self._first + self.steps_per_epoch - 1 and self._first == 1 and not self.own_loss:
            self._compare_data()
        if self.schedule.draws(step):
            self._draw(step)
        self._loss, self._of_step, self._has_gradients = None, 0, False
        if step == self.steps:
            self.close()

    # -- samples ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the store, or go on with the samples before the coming step."""
        self._first, earlier = self._coming, self._coming - 1
        chains = _of_all_processes(self.chain)
        self._ranks = [rank for rank, chain in enumerate(chains) if chain == self.chain]
        self._is_alone = len(chains) == 1
        held = held_rows(self.model)
        if held:
            parameters = dict(self.model.named_parameters())
            self.sampler.hold({parameters[name]: row for name, row in held.items()})
        if self._path is None or not self._writes:
            self._store = MemoryStore(self._narrow)
            return
        if (before := _WRITERS.get(self._path)) is not None:  # of a loop that an error ended, as a notebook's cell
            before._is_replaced = True
            if before._lock is not None:
                before._lock.release()
        _WRITERS[self._path] = self
        if earlier and (self._path / MANIFEST).exists():
            check_same_dtype(DiskStore(self._path), self._narrow)
            self._lock = continue_store(self._path, lambda store: [r for r in store.records if r.step <= earlier])
        else:
            description, shared = description_for_store(self.model), self._sharing.tensors()
            self._lock = begin_store(self._path, description, shared=shared, narrow=self._narrow)
        self._store = DiskStore(self._path)

    def _draw(self, step: int) -> None:
        names = self._sharing.names
        parameters = {n: p.detach() for n, p in self.model.named_parameters() if n not in names}
        buffers = {n: b for n, b in self.model.named_buffers() if n not in names and not is_prior_state(n)}
        bad = bad_tensor(parameters, buffers)
        energy = math.nan
        if self._loss is not None:
            energy = float(self._num_data * self._loss - self._log_prior)
        if bad is not None:
            raise NonFiniteEnergyError(
                f"the sample of step {step} has NaN or infinite numbers in '{bad}': use a smaller lr, or begin from "
                "the loop's last checkpoint",
                step,
                self.chain,
                energy,
                None,
            )
        self._check_replicas(list(parameters.values()), step)
        assert self._store is not None
        if self._writes:
            own = collapsed(parameters, self.model)
            shared = self._sharing.tensors()
            cycle = self.schedule.cycle_of(step)
            sample = PosteriorSample(step, cycle, self.chain, energy, 0.0, own, buffers, shared=shared)
            sample.temperature = rounded(mean_of(self.sampler.param_groups[0]["temperature"]))
            self._store.append(sample)

    @property
    def _writes(self) -> bool:
        return self._ranks[0] == _rank()

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Raise unless the sampler has the model's trainable parameters, and no others."""
        ours = named_trainable(self.model)
        theirs = {id(p) for group in self.sampler.param_groups for p in group["params"] if p.requires_grad}
        missing = [name for name, parameter in ours.items() if id(parameter) not in theirs]
        if missing:
            parts = "[*net.parameters(), *likelihood.parameters()]"
            raise ValueError(
                f"the sampler lacks {missing[0].removeprefix('net.')!r}, which requires gradients: pass "
                f"{parts if missing[0].startswith('likelihood.') else 'net.parameters()'} to it, or freeze the others"
            )
        if len(theirs) > len(ours):
            raise ValueError(
                "the sampler has parameters that are not the network's or the likelihood's, for which there is no "
                "prior: pass the network that the loop trains as net, before a framework copies it"
            )

    def _compare_data(self) -> None:
        """Warn if the data of the first epoch are not N."""
        seen, expected = self._seen * len(self._ranks), self._num_data
        if abs(seen - expected) > max(0.05 * expected, seen / self.steps_per_epoch):
            rank_zero_warn(
                f"The first epoch of {self.steps_per_epoch} steps had {seen} data, and the sampler has "
                f"num_data={expected}: N is the number of all training data, to which the posterior is conditioned."
            )

    def _check_replicas(self, tensors: list[Tensor], step: int) -> None:
        """Raise if another process has other parameters of the chain; all processes call it."""
        if self._is_alone:
            return
        sums = _of_all_processes(int(checksum(tensors)))
        first = self._ranks[0]
        other = next((rank for rank in self._ranks if sums[rank] != sums[first]), None)
        if other is not None:
            raise RuntimeError(
                f"rank {other} has other parameters than rank {first} at step {step}, and they share chain "
                f"{self.chain}, so its samples would be of no posterior: give all ranks one seed, and average their "
                "gradients; or pass each a chain=… of its own"
            )

    def _look_for_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Warn if gradients of some steps have one and the same norm, since the loop then clips them."""
        is_looked_at = self._coming < self._first + FEW or self.schedule.draws(self._coming)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not is_looked_at or not gradients or len(self._norms) == MOST_LOOKS:
            return
        norm = float(torch.stack([each.float() for each in torch._foreach_norm(gradients)]).norm())
        alike = sum(abs(earlier - norm) < ALIKE * norm for earlier in self._norms)
        self._norms.append(norm)
        if alike == 2 and abs(norm - float(f"{norm:.1e}")) < 1e-4 * norm:
            rank_zero_warn(
                f"The gradients of several steps have the norm {norm:.3g}, so the loop clips them, and the samples are "
                "not of the posterior: switch clipping off (max_grad_norm=0 of transformers' trainer)."
            )

    def _check_lr(self) -> None:
        """Raise if a scheduler sets the step size beside the schedule; warn if it alone does, once."""
        group = self.sampler.param_groups[0]
        lr, first = group["lr"], group["initial_lr"]
        if isinstance(lr, Tensor) or lr in (first, self._lr):
            return
        remedy = "remove it (lr_scheduler_type='constant' of transformers' trainer)"
        if self.schedule.sets_lr:
            raise ValueError(
                f"both {type(self.schedule).__name__} and a scheduler of the loop set the step size, which is {lr:.4g} "
                f"before step {self._coming}: {remedy}"
            )
        if self._lr == first:
            rank_zero_warn(
                f"A scheduler of the loop has set the step size from {first:.4g} to {lr:.4g}: if that is not meant, "
                f"{remedy}."
            )


_WRITERS: WeakValueDictionary[Path, SampleWriter] = WeakValueDictionary()
"""The newest writer of each folder in this process."""


def _sampler_in(optimizer: Any) -> Sampler:
    """Return the sampler in an optimizer that a framework has wrapped."""
    found = optimizer
    while not isinstance(found, Sampler) and hasattr(found, "optimizer"):
        found = found.optimizer
    if not isinstance(found, Sampler):
        raise TypeError(f"sampler should be a sampler such as SGHMC, got a {type(optimizer).__name__}")
    return found


def _rank() -> int:
    """Return the number of this process among the loop's."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _of_all_processes(value: Any) -> list[Any]:
    """Return what each of the loop's processes passes; all of them call it."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone
