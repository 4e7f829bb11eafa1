"""BayesianModule: a LightningModule whose training step is a step of a Markov chain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.loader import flat_loaders
from lightning_sgmcmc.batches.rows import repetition, resolve_num_data
from lightning_sgmcmc.chains.chains import ChainModel, Chains, check_step_size, sampler_of
from lightning_sgmcmc.chains.energies import Execution, targets_explained
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.chains.layout import present_place
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.starts import redraw
from lightning_sgmcmc.chains.trainer import instances_of, is_example, leave_out_graph, put_in_place, settle_folders
from lightning_sgmcmc.chains.weights import check_batch
from lightning_sgmcmc.checks import check_choice, check_control, check_count
from lightning_sgmcmc.compiling import Compile
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.fit.block_runs import has_blocks
from lightning_sgmcmc.fit.checks import OtherGradients, OtherWeights, check_namespace, warn_of_other_loss
from lightning_sgmcmc.fit.loggers import SamplingProgress, stay_offline_without_login
from lightning_sgmcmc.fit.resume import ExactResume, check_continues, count_saved_fit
from lightning_sgmcmc.fit.safeguards import Safeguards
from lightning_sgmcmc.health.report import HealthReport
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel, check_methods, check_model, check_shape, named_trainable
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.posterior.description import record_arguments
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.predictions import Prediction
from lightning_sgmcmc.priors import Prior
from lightning_sgmcmc.process import check_main_is_guarded
from lightning_sgmcmc.samplers import SGLD, Sampler
from lightning_sgmcmc.samplers.factories import check_sampler

DoublePrecision = pl.plugins.precision.DoublePrecision

OUTSIDE_A_FIT = (
    "{}.{} belongs to pl.Trainer.fit, which fills in N and the chains: with Fabric, or in a loop of your own, pass "
    "num_data=… to the module, take module.potential_energy(batch).sum() / num_data as the loss, and step a sampler, "
    "SGLD(module.parameters(), lr=…, num_data=…)"
)


class BayesianModule(ChainModel):
    """A network with a likelihood and a prior, trained by a sampler: the parameters walk through the posterior.

        U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ),   Ũ(θ) = (N/n)·Σ_{i in batch} -log p(y_i|x_i,θ) - log p(θ)

    The training loss is Ũ/N, a mean loss like any other (with C chains, their sum). Subclass it and define `forward`,
    or pass `net`. Batches are pairs (x, y) or dicts with "labels": see `inputs_and_target` and `output_of`.

    With `num_chains=C` the module holds C copies of its network: when a fit begins, every parameter and buffer gets a
    leading chain axis. `forward` and all other code is still written for one network; `with module.at_chain(c):`
    selects chain c. Samples are ordinary single networks.

    Args:
        net: the network; omit it in a subclass that defines `forward`.
        likelihood: p(y | output); omit it in a subclass that defines `log_likelihood`.
        prior: log p(θ) over all trainable parameters, including a learned noise scale; a number is the standard
            deviation of a `GaussianPrior`, and None is 1.
        sampler: a sampler class, or any callable that returns a sampler for parameters and the keyword arguments `lr`,
            `temperature`, `num_data`, `num_chains`, `seed` and, in a process that does not hold the run's first
            chain, `first_chain` (`functools.partial(SGHMC, friction=0.05)`).
        lr: step size in units of the mean potential, `lr = ε·N` for a paper's ε; None uses the sampler's default.
            A sequence sets one per chain of the run, a mapping one by name pattern (`{"*.fc.*": 0.1, "*": 1e-3}`, the
            first that matches), each a number or a sequence.
        temperature: τ of the target exp(-U/τ), used in sampling stages. A sequence sets one per chain of the run.
        num_data: N, the number of training data; None uses the datamodule's `num_data`, or the training data's length,
            and reads it again when an epoch begins, for data that grow (see `StreamDataModule`).
        num_chains: number of chains C in this process.
        chain_start: "own" draws a start for each chain except the first, which keeps the network's values (see
            `initialise_chain`); "same" starts all chains from those values; a list has a state dict for each chain of
            the run, or the path of a checkpoint (of one chain, or of as many as the run has), torch or sample file.
        shared_batch: whether all chains see the same mini-batches; else each has its own, from a `ResumableLoader`.
        chain_execution: "loop" computes one chain after another, bit for bit as each alone; "vmap" all at once, and
            "unrolled" one by one in one function; "auto" loops on a CPU, and elsewhere takes the faster of the others.
        compile: compile the network's passes by `torch.compile`; "auto" does on CUDA in fits of 5,000 steps or more, if
            the network compiles.
        seed: seed of the injected noise; None uses `seed_everything`'s, or a random one that all ranks share.
        nonfinite_energy: what to do about a NaN or infinite energy or gradient. "stop" ends the run with a
            `NonFiniteEnergyError` before the state reaches a sample or checkpoint; "skip" omits the update and counts
            it (`skipped_steps`), but synchronizes with a CUDA device once a step.
        max_skipped_in_a_row: with "skip", this many skipped steps in a row stop the run.
        sampled: name patterns of the parameters to sample (`["*.fc.*", "*.lora_*"]`), beside the likelihood's; None
            samples those that require gradients. All chains share the others, a store has them once, and parts without
            a sampled parameter keep their BatchNorm statistics.
        frozen_dropout: whether such parts drop out in training.

    Raises:
        ValueError: for a negative or infinite temperature or lr, a num_data or num_chains below 1, or a weight decay.
        TypeError: if an argument has the wrong type, or a subclass replaces `training_step` or another method of a run.

    Example::

        module = BayesianModule(net, Categorical(), GaussianPrior(std=0.3), sampler=SGHMC, lr=0.1, num_chains=4)
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | float | None = None,
        sampler: Callable[..., Sampler] = SGLD,
        lr: float | Sequence[float] | Mapping[str, float | Sequence[float]] | None = None,
        temperature: float | Sequence[float] = 1.0,
        num_data: int | None = None,
        num_chains: int = 1,
        chain_start: Literal["own", "same"] | Sequence[Any] = "own",
        shared_batch: bool = False,
        chain_execution: Execution = "auto",
        compile: Compile = "auto",
        seed: int | None = None,
        nonfinite_energy: Literal["stop", "skip"] = "stop",
        max_skipped_in_a_row: int = 100,
        sampled: Sequence[str] | None = None,
        frozen_dropout: bool = False,
    ) -> None:
        super().__init__(net, likelihood, prior)
        check_methods(self, BayesianModule)
        check_sampler(sampler, lr)
        check_control("temperature", temperature)
        check_step_size(lr)
        for name, count in (("num_data", num_data), ("max_skipped_in_a_row", max_skipped_in_a_row)):
            check_count(name, count)
        check_choice("nonfinite_energy", nonfinite_energy, ("stop", "skip"))
        if self._compiled_net and (num_chains > 1 or compile is True):
            raise ValueError(
                "a network that torch.compile has wrapped can neither run for several chains nor be compiled "
                "again: pass the plain network and compile=True"
            )
        self.sampler_factory = sampler
        self.lr = lr
        self.temperature = float(temperature) if isinstance(temperature, int | float) else tuple(temperature)
        self.num_data = self.given_num_data = num_data
        self.nonfinite_energy = nonfinite_energy
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.chains = Chains(self, num_chains, chain_start, shared_batch, chain_execution, compile, seed)
        """The chains of this process, their energies and state."""
        self.chains.sharing.choose(sampled, frozen_dropout)
        self._looks_at_loss = 0
        """Coming backward passes whose loss is compared with the energy, each a wait for the device."""
        self._other_gradients: OtherGradients | None = None
        """Looks at what a user's hooks make of the coming gradients."""
        self.other_weights: OtherWeights | None = None
        """Looks at whether they change the weights between the coming steps."""
        self.plan: RunPlan | None = None
        """What the fit reaches and costs by its settings, once it begins; None without a schedule."""
        self.posterior: Posterior | None = None
        """The collected samples, if a callback collects them."""
        self.evaluations: dict[str, Evaluation] = {}
        """By stage ("val", "test"), the `Evaluation` of the collected samples, if a callback makes one."""
        self.health: HealthReport | None = None
        """The last report of a `ChainHealth` callback."""
        self.contour: LearnedContour | None = None
        """What a `ContourGradient` callback has learned."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            record_arguments(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this attribute about ten times a step, and setting attributes on an nn.Module is slow.
        if name == "_current_fx_name":
            self.__dict__[name] = value
            return
        begun = isinstance(value, nn.Module) and "chains" in self.__dict__ and self.chains.stacked is not None
        if begun and state_of(value):
            raise ValueError(
                f"{name}: this module's {self.num_chains} chains have begun, and a new {type(value).__name__} has the "
                "tensors of one: create a new module with it"
            )
        super().__setattr__(name, value)

    @property
    def num_chains(self) -> int:
        """C, the number of chains in this process."""
        return self.chains.num_chains

    @contextmanager
    def at_chain(self, chain: int) -> Iterator[None]:
        """Select one chain: inside the context, the module is that chain's ordinary network.

        Args:
            chain: its index in this process, from 0.

        Raises:
            IndexError: if there is no such chain.
        """
        with self.chains.at(chain):
            yield

    def initialise_chain(self, chain: int) -> None:
        """Draw a chain's initial state into the module's own tensors; override it for other initial states.

        A subclass's constructor is called again with the same arguments. Parts that it does not create, such as a
        network passed to it, are initialised by their layers' `reset_parameters`. Frozen parameters are unchanged.

        Args:
            chain: global index of the chain, from 1; it seeds torch's default generator.
        """
        cls, arguments = type(self), self._arguments
        redraw(self, chain, None if cls is BayesianModule else lambda: cls(**arguments))

    def potential_energy(self, batch: Any) -> Tensor:
        """Return Ũ of a batch for each chain, shape (C,), in nats.

        Args:
            batch: one batch for all chains, or a `ChainBatches` with one for each.

        Raises:
            RuntimeError: if N is not known yet.
        """
        if self.num_data is None:
            raise RuntimeError(
                "num_data is unknown before the fit starts: pass num_data=… to compute energies outside a fit"
            )
        return self.chains.potential_energy(batch, self.num_data)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stacked = self.chains.stacked
        # A data-parallel wrapper calls the training step through its own `forward`, set on the object.
        if stacked is not None and stacked.is_at_rest and "forward" not in vars(self):
            if is_example(self, args, kwargs):  # of a model summary
                with self.at_chain(0):
                    return super().__call__(*args, **kwargs)
            raise RuntimeError(
                f"{type(self).__name__} holds {self.num_chains} chains, and an output belongs to one: call it inside "
                "`with module.at_chain(c):`, or average over samples with module.posterior.predict(x)"
            )
        return super().__call__(*args, **kwargs)

    def on_posterior_sample(self, sample: PosteriorSample) -> None:
        """Called with each sample when it is drawn, after the callbacks' `on_posterior_sample`; override as needed."""

    @property
    def reads_samples(self) -> bool:
        """Whether the user's class replaces `on_posterior_sample`."""
        return self.replaces("on_posterior_sample")

    def configure_model(self) -> None:
        """Stack the chains, once; a subclass that defines its layers here calls `super().configure_model()` last."""
        super().configure_model()
        self.chains.begin(self._trainer, self.initialise_chain)
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        if isinstance(plugin, DoublePrecision):  # Lightning converts after a checkpoint is loaded, and so rounded
            plugin.convert_module(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore from `state_dict()` of one network or of stacked chains; the latter stacks this module's chains."""
        if self.chains.are_stacked_in(state_dict):
            self.configure_model()
        self.chains.seeds.loads += 1
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the coming fit be the one after the checkpoint's: it continues from the states, with noise of its own.

        A subclass that defines it calls `super().on_load_checkpoint(checkpoint)`.

        Raises:
            ValueError: if a fit is to continue from a checkpoint of an optimizer.
        """
        if self._trainer is not None and self._trainer.state.fn == "fit":
            check_continues(checkpoint, str(self._trainer.ckpt_path), type(self).__name__)
        count_saved_fit(self.chains.seeds, checkpoint, self._trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss Σ_c Ũ_c/N, in nats per example, a sum over chains: log it divided by `num_chains`.

        Raises:
            RuntimeError: outside a fit.
        """
        if self.chains.energies is None:
            raise RuntimeError(OUTSIDE_A_FIT.format(type(self).__name__, "training_step"))
        return self.chains.loss(batch, batch_idx, self.trainer)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; gather and correct the gradients once the batch is complete."""
        if self._looks_at_loss > 0:
            differs = warn_of_other_loss(self.trainer, self, loss)
            self._looks_at_loss = 0 if differs else self._looks_at_loss - 1
        self.chains.backward(loss, *args, **kwargs)
        if self._other_gradients is not None:
            self._other_gradients.keep(self.chains)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the sampler; a step that a loss scaler skips does not change BatchNorm's statistics."""
        sampler = getattr(optimizer, "optimizer", optimizer)
        before = sampler.step_count
        optimizer.step(closure=optimizer_closure)
        if self.other_weights is not None:
            self.other_weights.keep(sampler, self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
        if sampler.step_count == before and sampler.guard is not None and sampler.guard.has_scaler:
            sampler.guard.skipped_by_scaler()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients, including those of the chains' slices."""
        self.chains.clear_gradients(optimizer)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient of each chain by its own norm."""
        if self._other_gradients is not None:
            self._other_gradients.compare(self.chains)
        if self.other_weights is not None:
            self.other_weights.compare()
        by_chain = bool(gradient_clip_val) and gradient_clip_algorithm != "value"
        if not (by_chain and self.chains.clip_gradients(float(gradient_clip_val or 0))):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the current state's mean negative log likelihood as `val/nll`."""
        self._log_nll(batch, batch_idx, dataloader_idx, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the current state's mean negative log likelihood as `test/nll`, if there are no posterior samples."""
        self._log_nll(batch, batch_idx, dataloader_idx, "test")

    def _log_nll(self, batch: Any, batch_idx: int, dataloader_idx: int, stage: str) -> None:
        in_fit = self.trainer.state.fn == "fit"
        if not in_fit and self.posterior is not None and len(self.posterior) > 0:
            return  # after a fit the samples are evaluated, not the chain's last state
        if batch_idx == 0 and (self.trainer.sanity_checking or not in_fit):  # else training batches were checked
            check_batch(self, self.chains.stacked, batch)
        rows = []
        for chain in range(self.num_chains):
            with targets_explained(self, self.chains.stacked, batch), self.at_chain(chain):
                rows.append(self.log_likelihood(batch))
        each = torch.stack(rows)
        check_shape(each, chains=True)
        size = each.shape[1]
        repeated, ratio = None, 1.0
        if not self.trainer.training:
            loop = "test" if self.trainer.testing else "val"  # a test_step may call validation_step
            loader = flat_loaders(getattr(self.trainer, f"{loop}_dataloaders"))[dataloader_idx]
            limit = getattr(self.trainer, f"num_{loop}_batches")[dataloader_idx]
            repeated, ratio = repetition(loader, batch_idx, limit)
        each = each[:, :-1] if size == repeated else each
        self.chains.observed.validation.add(each)
        # The sizes that Lightning averages over ranks are integers, so these stay equal.
        mean = each.sum() / (self.num_chains * size) * ratio
        self.log(f"{stage}/nll", -mean, batch_size=size, sync_dist=True)

    def on_predict_start(self) -> None:
        """Read the samples into memory, once for all batches.

        Raises:
            RuntimeError: if there are no samples, unless a `predict_step` of the user's decides what to do.
        """
        if self.replaces("predict_step") and (self.posterior is None or len(self.posterior) == 0):
            return
        self.posterior = self._samples().in_memory(getattr(self.trainer, "datamodule", None))

    def replaces(self, method: str) -> bool:
        """Return whether the user's class, or code that set it on the object, replaces a method of this class."""
        return method in vars(self) or getattr(type(self), method) is not getattr(BayesianModule, method)

    def _samples(self) -> Posterior:
        if self.posterior is None or len(self.posterior) == 0:
            raise RuntimeError(
                "prediction averages over posterior samples, and there are none: add a SampleCollector to the trainer, "
                "with the dirpath of the fit's samples if they were written by another process"
            )
        return self.posterior

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Return the posterior predictive for a batch: inputs, or a batch as in training, whose target is ignored."""
        return self._samples().predict([batch]).without_distributions()

    def configure_optimizers(self) -> Any:
        """Return the sampler, with N, the seed and the number of chains filled in.

        Raises:
            RuntimeError: without a trainer.
            ValueError: for a module that is not complete, or has nothing to sample.
        """
        if self._trainer is None:
            raise RuntimeError(OUTSIDE_A_FIT.format(type(self).__name__, "configure_optimizers"))
        check_model(self)
        check_methods(self, BayesianModule)
        chains = self.chains
        self._looks_at_loss = 3 if self.replaces("training_step") else 0
        self._other_gradients, self.other_weights = OtherGradients(self.trainer, self), OtherWeights(self.trainer, self)
        chains.trainable = named_trainable(self)
        chains.sharing.check(chains.trainable)
        if not chains.trainable:
            raise ValueError(f"{type(self).__name__} has no trainable parameters to sample: set requires_grad")
        with self.at_chain(0):
            EnergyModel.log_prior(self)  # raises now if a parameter has no prior
        self.prior.check_names(list(chains.trainable))
        name = type(self).__name__
        self.num_data, chains.num_data_is_given = resolve_num_data(self.given_num_data, self.trainer, name)
        chains.reset(self.num_data)
        self.contour = None
        chains.seeds.ensure(self._trainer)
        made = chains.make_sampler(self.sampler_factory, self.lr, self.temperature)
        chains.traces = has_blocks(self.trainer, self)
        chains.flatten(made, self.trainer)
        return made

    def configure_callbacks(self) -> list[pl.Callback]:
        """Add the callbacks that every run needs, after the user's and before the checkpoint callbacks."""
        check_main_is_guarded()
        _undo_compilation(self)
        check_namespace(self.trainer)  # Lightning itself would fail over another's datamodule before any later hook
        settle_folders(self.trainer)
        stay_offline_without_login(self.trainer.loggers)  # the loggers start before any later hook
        if self.num_chains > 1:
            leave_out_graph(self.trainer.loggers)
        self.chains.claims.clear()
        self.chains.seeds.place = present_place()
        put_in_place(self.trainer)
        if instances_of(self.trainer, Safeguards):
            return []
        safeguards = Safeguards(self.nonfinite_energy, self.max_skipped_in_a_row)
        needed: list[pl.Callback] = [safeguards]
        if not instances_of(self.trainer, ExactResume):
            needed.insert(0, ExactResume())  # a batch is counted before the run can be interrupted
        if self.trainer.progress_bar_callback is not None:
            needed.append(SamplingProgress(safeguards))
        return needed

    @property
    def sampler(self) -> Sampler:
        """The sampler of the running fit."""
        return sampler_of(self)

    @property
    def target_temperature(self) -> "float | Tensor":
        """τ of the running fit: a number, or one for each chain of this process, shape (C,), on the device."""
        return self.chains.own_control("temperature", self.temperature)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped in the last fit because their energy or gradient was not finite."""
        return self.chains.counters.skipped_steps

    @property
    def gradient_evaluations(self) -> int:
        """Per-datum gradients computed for each chain in the last fit: those of a step's mini-batch, or of all its
        candidates, and those of control variates."""
        return self.chains.counters.gradient_evaluations


COMPILED = "forward", "training_step", "validation_step", "test_step", "predict_step"
"""Methods that Lightning replaces on a module which `torch.compile` has wrapped."""


def _undo_compilation(module: BayesianModule) -> None:
    """Give a module that `torch.compile` has wrapped its methods back, since a step is more than tensor operations."""
    context = module._compiler_ctx
    if context is None:
        return
    for name in COMPILED:
        own = context[f"original_{name}"]
        vars(module).pop(name)
        if getattr(own, "__func__", None) is not getattr(type(module), name):  # the user has set it on the object
            setattr(module, name, own)
    module._compiler_ctx = None
    name = type(module).__name__
    rank_zero_warn(f"torch.compile({name}) has no effect: pass {name}(compile=True), which compiles its network.")


record_arguments(BayesianModule)
# Scripting compiles every property that is not named here.
BayesianModule.__jit_unused_properties__ = [
    *pl.LightningModule.__jit_unused_properties__,
    *(name for cls in (EnergyModel, BayesianModule) for name, part in vars(cls).items() if isinstance(part, property)),
]
