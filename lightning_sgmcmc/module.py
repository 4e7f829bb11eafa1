"""BayesianModule: a LightningModule whose training step is a step of a Markov chain."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.count import count_training_data
from lightning_sgmcmc.chains.chains import ChainModule
from lightning_sgmcmc.chains.energies import ChainEnergies, ChainExecution, check_shape
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.state import ChainState
from lightning_sgmcmc.checks import check_choice, check_control, check_count, check_part, check_sampler, name_of
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.likelihoods import Likelihood, Prediction
from lightning_sgmcmc.posterior.description import record_arguments
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.run.guard import EnergyGuard, NonFiniteEnergy
from lightning_sgmcmc.run.handover import SampleHandover
from lightning_sgmcmc.run.offline import stay_offline_without_login
from lightning_sgmcmc.run.progress_bar import SamplingProgress
from lightning_sgmcmc.run.resume import ExactResume
from lightning_sgmcmc.run.safeguards import Safeguards
from lightning_sgmcmc.samplers import SGLD, Sampler

if TYPE_CHECKING:
    from lightning_sgmcmc.posterior.posterior import Posterior


class BayesianModule(ChainModule):
    """A network with a likelihood and a prior, trained by a sampler: the parameters walk through the posterior.

        U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ),   Ũ(θ) = (N/n)·Σ_{i in batch} -log p(y_i|x_i,θ) - log p(θ)

    The training loss is Ũ/N, a mean loss like any other (with C chains, their sum). Subclass it and define `forward`,
    or pass `net`. Batches are pairs (x, y) unless `output_and_target` or `log_likelihood` is overridden.

    With `num_chains=C` the module holds C copies of its network: when a fit begins, every parameter and buffer gets a
    leading chain axis. `forward` and all else that is written for one network stays so; `with module.at_chain(c):` puts
    chain c in place. Samples come out as ordinary single networks.

    Args:
        net: the network; leave it out in a subclass that defines `forward`.
        likelihood: p(y | output); leave it out in a subclass that defines `log_likelihood`.
        prior: log p(θ) over all trainable parameters, a learned noise scale included.
        sampler: a sampler class, or anything that makes a sampler from parameters and the keyword arguments `lr`,
            `temperature`, `num_data`, `num_chains`, `seed` and, in a process that does not hold the run's first
            chain, `first_chain` (`functools.partial(SGHMC, friction=0.05)`).
        lr: step size in units of the mean potential, `lr = ε·N` for a paper's ε; None takes the sampler's own. A
            sequence gives each chain of the run its own.
        temperature: τ of the target exp(-U/τ); schedules go to it in their sampling stages. A sequence gives each
            chain of the run its own.
        num_data: N, the number of training data; None takes the datamodule's `num_data`, or the length of the
            training data set.
        num_chains: number of chains C in this process.
        chain_start: "own" draws a start for each chain but the first, which has the network's values (see
            `initialise_chain`); "same" starts all chains there.
        shared_batch: all chains see the same mini-batches; else each has a data order of its own, where the loader can
            give one (`ResumableLoader`, and so the library's datamodules).
        chain_execution: "loop" computes one chain after the other, bit for bit as each alone; "vmap" all at once;
            "auto" loops on a CPU, where that is faster, and takes vmap elsewhere.
        compile: send the network's forward and backward pass through `torch.compile`.
        seed: seed of the injected noise; None takes `seed_everything`'s, or a random one that all ranks share.
        nonfinite_energy: what to do about a NaN or infinite energy or gradient. "stop" ends the run with a
            `NonFiniteEnergyError` before any sample or checkpoint is made of it; "skip" leaves the step out and counts
            it (`skipped_steps`), at the price of waiting for a CUDA device once a step.
        max_skipped_in_a_row: so many steps left out one after the other stop the run all the same.

    Raises:
        ValueError: for a negative or infinite temperature or lr, a num_data or num_chains below 1, or a weight decay.
        TypeError: if a part is a class in place of an object, or of the wrong kind, or a number is none.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        sampler: Callable[[Iterable[nn.Parameter]], Sampler] = SGLD,
        lr: float | Sequence[float] | None = None,
        temperature: float | Sequence[float] = 1.0,
        num_data: int | None = None,
        num_chains: int = 1,
        chain_start: Literal["own", "same"] = "own",
        shared_batch: bool = False,
        chain_execution: ChainExecution = "auto",
        compile: bool = False,
        seed: int | None = None,
        nonfinite_energy: NonFiniteEnergy = "stop",
        max_skipped_in_a_row: int = 100,
    ) -> None:
        super().__init__()
        check_part("net", net, nn.Module)
        check_part("likelihood", likelihood, Likelihood)
        check_part("prior", prior, Prior)
        check_sampler(sampler)
        for name, value in (("temperature", temperature), ("lr", lr)):
            check_control(name, value)
        for name, count in (
            ("num_data", num_data),
            ("num_chains", num_chains),
            ("max_skipped_in_a_row", max_skipped_in_a_row),
        ):
            check_count(name, count)
        check_count("seed", seed, least=0)
        check_choice("nonfinite_energy", nonfinite_energy, ("stop", "skip"))
        check_choice("chain_start", chain_start, ("own", "same"))
        check_choice("chain_execution", chain_execution, ("auto", "loop", "vmap"))
        if net is not None:
            if hasattr(net, "_orig_mod") and (num_chains > 1 or compile):
                raise ValueError(
                    "a network that torch.compile has wrapped can be run neither for several chains nor compiled "
                    "again: pass the plain network, and compile=True"
                )
            # A compiled network trains compiled and is evaluated as it was; so samples have the plain names.
            self.net = getattr(net, "_orig_mod", net)
            if self.net is not net:
                self.__dict__["_compiled_net"] = net
        self.likelihood = likelihood
        self.prior = prior if prior is not None else GaussianPrior()
        self.sampler_factory = sampler
        self.lr = lr
        self.temperature = float(temperature) if isinstance(temperature, int | float) else tuple(temperature)
        self.num_data = num_data
        self.num_chains = num_chains
        self.chain_start = chain_start
        self.shared_batch = shared_batch
        self.chain_execution = chain_execution
        self.compile_network = bool(compile)
        self.seed = seed
        self.nonfinite_energy = nonfinite_energy
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self._guard: EnergyGuard | None = None
        self._looks_at_targets = True
        self.chain_state = ChainState()
        self.posterior: Posterior | None = None
        self.evaluations: dict[str, Any] = {}
        """By stage ("val", "test"), the `Evaluation` of the collected samples, if a callback makes one."""
        self.health: dict[str, Any] | None = None
        """The last report of a `ChainHealth` callback."""
        self.contour: LearnedContour | None = None
        """What a `ContourGradient` callback has learned."""
        self._given_num_data = num_data
        self._sampling_seed = seed
        self._trainable: dict[str, Tensor] | None = None
        self._trainable_home: tuple[dict[str, Any], str] | None = None
        self.save_hyperparameters(
            {
                "likelihood": repr(likelihood),
                "prior": repr(self.prior),
                "sampler": name_of(sampler),
                "lr": lr,
                "temperature": self.temperature,
                "num_chains": num_chains,
            }
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            record_arguments(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this one some ten times a step, and nn.Module's way to set a plain attribute is slow.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def recorded_arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments that rebuild the network: all but what only training needs."""
        skipped = {"prior", "sampler", "num_chains", "seed", "nonfinite_energy"}
        skipped |= {"chain_start", "shared_batch", "chain_execution", "compile", "max_skipped_in_a_row"}
        return {name: value for name, value in self.__dict__["_arguments"].items() if name not in skipped}

    # -- the model ----------------------------------------------------------------------------------------------------

    def forward(self, x: Any) -> Any:
        """Return the network's output for the inputs `x`, for one chain."""
        if "net" not in self._modules:
            raise NotImplementedError(f"{type(self).__name__} needs a network: pass net=… or define forward")
        compiled = self.__dict__.get("_compiled_net") if self.training else None
        return self.net(x) if compiled is None else compiled(x)

    def output_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the network's output for a batch and its target; override it where a batch is not a pair (x, y)."""
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise TypeError(
                f"a batch should be a pair (x, y), got {type(batch).__name__}: override output_and_target(batch) of "
                f"{type(self).__name__} for batches of another form"
            )
        x, y = batch
        return self(x), y

    def log_likelihood(self, batch: Any) -> Tensor:
        """Return log p(y|x,θ) of each datum of a batch, shape (n,), for one chain."""
        if self.likelihood is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a likelihood: pass likelihood=… or define log_likelihood(batch)"
            )
        output, target = self.output_and_target(batch)
        if self.__dict__["_looks_at_targets"] and self.training:
            self.likelihood.check_target(output.detach(), target)  # once a fit, since it waits for the device
            self.__dict__["_looks_at_targets"] = False
        return self.likelihood.log_prob(output, target)

    def log_prior(self) -> Tensor:
        """Return log p(θ) of the trainable parameters, shape (), for one chain."""
        parameters = self.__dict__["_trainable"]
        home = self.__dict__["_trainable_home"] if parameters else None
        # The names are kept, since to collect them takes longer than the sum; unless other tensors are in their places.
        if home is None or home[0][home[1]] is not next(iter(parameters.values())):
            parameters = self._named_trainable()
        return self.prior.log_prob(parameters)

    def potential_energy(self, batch: Any) -> Tensor:
        """Return Ũ of a batch for each chain, shape (C,), in nats.

        Args:
            batch: one batch for all chains, or a `ChainBatches` with one for each.
        """
        if self._chains is None:
            return self._mean_potential(batch).reshape(1) * self._known_num_data()
        energies = self._energies or ChainEnergies(self, self._chains, "loop", False)
        return energies(batch, through_stack=True) * self._known_num_data()

    def _mean_potential(self, batch: Any) -> Tensor:
        """Return Ũ/N, shape () for the one chain and (C,) for several."""
        energies: ChainEnergies | None = self.__dict__["_energies"]
        if energies is not None:
            return energies(batch)
        log_likelihood = self.log_likelihood(batch)
        check_shape(log_likelihood)
        log_prior = self.log_prior()
        state: ChainState = self.__dict__["chain_state"]
        state.log_prior = log_prior.detach()
        state.batch_size = len(log_likelihood)
        if state.keeps_each:
            state.log_likelihood = log_likelihood.detach()
        return torch.add(log_likelihood.mean(), log_prior, alpha=1 / self._known_num_data()).neg()

    def score(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return what an evaluation averages over samples.

        Returns:
            log p(y|x,θ) of each datum (n,), the likelihood's terms (see `Likelihood`), and the targets (None and no
            terms where the module has its own log_likelihood and no likelihood).
        """
        if self.likelihood is None:
            return self.log_likelihood(batch), {}, None
        output, target = self.output_and_target(batch)
        terms = self.likelihood.terms(output) | self.likelihood.target_terms(output, target)
        if type(self).log_likelihood is BayesianModule.log_likelihood:
            return self.likelihood.log_prob(output, target), terms, target
        return self.log_likelihood(batch), terms, target

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep the chains' energies; return the loss Σ_c Ũ_c/N."""
        guard: EnergyGuard | None = self.__dict__["_guard"]
        if guard is not None and batch_idx % self.trainer.accumulate_grad_batches == 0:
            guard.begin(batch)
        potential = self._mean_potential(batch)
        state: ChainState = self.__dict__["chain_state"]
        state.gradient_evaluations += state.batch_size * self._layout.ranks_per_chain
        trainer = self.trainer
        accumulated = trainer.accumulate_grad_batches
        if guard is not None and guard.shares_gradients:
            potential = guard.visible_in_gradient(potential)
        if accumulated == 1:
            state.mean_potential = potential.detach()
            return potential.sum() if potential.dim() else potential
        position = batch_idx % accumulated
        window = min(accumulated, trainer.num_training_batches - (batch_idx - position))
        state.accumulating = position + 1 < window
        each = accumulated // state.candidates
        first = position - position % each
        state.batch_complete = position + 1 == min(first + each, window)
        state.batch_share = (min(first + each, window) - first) / window
        change = potential.detach() - (state.mean_potential if position > 0 else 0)
        state.mean_potential = change / (position + 1) + (state.mean_potential if position > 0 else 0)
        # Lightning divides by the whole window, also where the epoch's last one is shorter.
        potential = potential * (accumulated / window)
        return potential.sum() if potential.dim() else potential

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Make a step of the sampler; one that a loss scaler leaves out leaves no trace in BatchNorm's statistics."""
        guard: EnergyGuard | None = self.__dict__["_guard"]
        if guard is None or not guard.has_scaler:
            optimizer.step(closure=optimizer_closure)
            return
        before = self.sampler.step_count
        optimizer.step(closure=optimizer_closure)
        if self.sampler.step_count == before:
            guard.skipped_by_scaler()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the present state's mean negative log likelihood as `val/nll`."""
        self._log_nll(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the present state's mean negative log likelihood as `test/nll`, if there are no posterior samples."""
        self._log_nll(batch, "test")

    def _log_nll(self, batch: Any, stage: str) -> None:
        if self.trainer.state.fn != "fit" and self.posterior is not None and len(self.posterior) > 0:
            return  # after a fit the samples speak, not the state that the chain happens to be in
        each = []
        for chain in range(self.num_chains if self._chains is not None else 1):
            with self.at_chain(chain) if self._chains is not None else nullcontext():
                each.append(self.log_likelihood(batch))
        self.log(f"{stage}/nll", -torch.stack(each).mean(), batch_size=len(each[0]), sync_dist=True)

    def on_predict_start(self) -> None:
        """Read the samples into memory, once for all batches.

        Raises:
            RuntimeError: if there are none.
        """
        if self.posterior is None or len(self.posterior) == 0:
            raise RuntimeError(
                "prediction averages over posterior samples, and there are none: add a SampleCollector to the trainer, "
                "with the dirpath of a fit's samples if this is another process"
            )
        self.posterior = self.posterior.in_memory()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Return the posterior predictive of a batch: inputs, or a tuple that starts with them."""
        assert self.posterior is not None
        return self.posterior.predict(batch[0] if isinstance(batch, list | tuple) else batch)

    def configure_optimizers(self) -> Any:
        """Make the sampler, with N, the seed and the number of chains filled in."""
        self._check_model()
        self._trainable = self._named_trainable()
        if not self._trainable:
            raise ValueError(f"{type(self).__name__} has no trainable parameters, so there is nothing to sample")
        self._trainable_home = self._home_of(next(iter(self._trainable.values())))
        with self.at_chain(0):
            self.prior.log_prob(self._named_trainable())  # speaks up now if a parameter has no prior
        self.num_data = self._resolve_num_data()
        chains = self.num_chains
        self.chain_state = ChainState(num_data=self.num_data, log_weight=torch.zeros(chains))  # nothing of another fit
        self.contour = None
        self._sampling_seed = self._resolve_seed()
        options: dict[str, Any] = {
            "num_data": self.num_data,
            "temperature": self.target_temperature,
            "num_chains": chains,
            "seed": self._sampling_seed,
        }
        if self._layout.first_chain:
            options["first_chain"] = self._layout.first_chain
        if self.lr is not None:
            options["lr"] = self._of_chains("lr", self.lr)
        sampler = self.sampler_factory(self._trainable.values(), **options)  # type: ignore[arg-type]
        if not isinstance(sampler, Sampler):
            raise TypeError(
                f"sampler={name_of(self.sampler_factory)} made a {type(sampler).__name__}, which adds no noise: take "
                "one of lightning_sgmcmc.samplers (at temperature 0 they are torch's optimizers)"
            )
        return sampler

    def configure_callbacks(self) -> list[pl.Callback]:
        """Add what every run needs, behind the user's callbacks and before checkpoints are written: the callbacks that
        hand samples over and guard the run, that make a resume exact, and that fill the progress bar."""
        stay_offline_without_login(self.trainer.loggers)  # no later hook comes before the loggers start
        if any(isinstance(callback, SampleHandover) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            return []
        handover = Safeguards()
        needed: list[pl.Callback] = [ExactResume(), handover]  # a batch is counted before the run can be interrupted
        if self.trainer.progress_bar_callback is not None:
            needed.append(SamplingProgress(handover))
        return needed

    def on_posterior_sample(self, sample: PosteriorSample) -> None:
        """Called with each sample when it is drawn, after the callbacks' hooks of this name; override at will."""

    def begin_energies(self, trainer: pl.Trainer) -> None:
        """Choose how the chains' energies are computed, when a fit begins."""
        self._energies = None
        if self._chains is None and not self.compile_network:
            return
        self._energies = ChainEnergies(self, self._chains, self._execution(), self.compile_network)
        # A data-parallel wrapper looks after the stacked parameters alone.
        self._energies.through_stack = isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel)

    def end_energies(self) -> None:
        """Let go of what only a fit needs, so that the module can be copied and pickled."""
        self._energies = None
        self.chain_state.begin_chain = None

    def _execution(self) -> ChainExecution:
        """Return "loop" or "vmap"."""
        if self.chain_execution != "auto":
            return self.chain_execution
        return "loop" if self.device.type == "cpu" else "vmap"

    # -- sampling -----------------------------------------------------------------------------------------------------

    @property
    def sampler(self) -> Sampler:
        """The sampler of the running fit."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        if not isinstance(optimizer, Sampler):
            raise TypeError(
                f"{type(self).__name__} should be trained by one sampler, got {type(optimizer).__name__}: leave "
                "configure_optimizers to BayesianModule, or return one sampler from it"
            )
        return optimizer

    @property
    def target_temperature(self) -> "float | Tensor":
        """τ of the running fit: a number, or one for each chain of this process, shape (C,), on the device."""
        return self._of_chains("temperature", self.temperature)

    @property
    def skipped_steps(self) -> int:
        """Steps of the last fit that were left out because their energy or gradient was not finite."""
        return self.chain_state.skipped_steps

    @property
    def gradient_evaluations(self) -> int:
        """Data whose gradient has been computed for each chain in the last fit: those of a step's mini-batch, or of all
        its candidates, and what control variates compute."""
        return self.chain_state.gradient_evaluations

    @property
    def sampling_seed(self) -> int | None:
        """The seed of the injected noise, once a fit has begun."""
        return self._sampling_seed

    # -- N, seed, checks ----------------------------------------------------------------------------------------------

    def _named_trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def _home_of(self, parameter: Tensor) -> tuple[dict[str, Any], str]:
        """Return the dictionary and the key by which a module holds a parameter."""
        for part in self.modules():
            for key, held in part._parameters.items():
                if held is parameter:
                    return part._parameters, key  # type: ignore[return-value]
        raise KeyError("no parameter of this module")

    def _known_num_data(self) -> int:
        if self.num_data is None:
            raise RuntimeError(
                "num_data is not known before the fit starts: pass num_data=… to use energies outside one"
            )
        return self.num_data

    def _check_model(self) -> None:
        cls = type(self)
        self.__dict__["_looks_at_targets"] = True
        self._check_layers()
        if not self.automatic_optimization:
            raise ValueError(
                f"{cls.__name__} samples by automatic optimization: leave automatic_optimization at True, and take "
                "the steps by a sampler"
            )
        own_likelihood = cls.log_likelihood is not BayesianModule.log_likelihood
        if self.likelihood is None and not own_likelihood:
            raise ValueError(f"{cls.__name__} needs a likelihood: pass likelihood=… or define log_likelihood(batch)")
        own_forward = cls.forward is not BayesianModule.forward
        own_output = cls.output_and_target is not BayesianModule.output_and_target
        if "net" not in self._modules and not (own_forward or own_likelihood or own_output):
            raise ValueError(f"{cls.__name__} needs a network: pass net=… or define forward")

    def _resolve_num_data(self) -> int:
        """Return N: the explicit one, else the datamodule's or the data set's length; they must not contradict."""
        found, source = count_training_data(self.trainer)
        given = self._given_num_data
        if given is None and found is None:
            raise ValueError(
                f"the number of training data is not known ({source}): pass num_data=… to {type(self).__name__}"
            )
        if given is not None and found is not None and given != found:
            raise ValueError(
                f"num_data={given} contradicts {source}, which says {found}; leave num_data out (to temper the "
                "posterior, set temperature)"
            )
        return given if given is not None else found  # type: ignore[return-value]

    def _resolve_seed(self) -> int:
        if self.seed is not None:
            return self.seed
        if self._sampling_seed is not None and self._chains is not None:
            return self._sampling_seed  # the chains' starts are of it
        seed = os.environ.get("PL_GLOBAL_SEED") or int.from_bytes(os.urandom(4), "little")
        return int(self.trainer.strategy.broadcast(int(seed))) if self._trainer is not None else int(seed)


record_arguments(BayesianModule)
