"""Guard against NaN and infinite energies: such a step never reaches parameters, samples or checkpoints."""

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import has_loss_scaler
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.chains.weights import check_batch
from lightning_sgmcmc.fit.checkpoints import describe_checkpoint, last_good_checkpoint
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.plain import parts_in
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.tensors import all_finite, bad_tensor, first_not_finite


class DeferredCheck:
    """Reads numbers from the device some steps after they were computed: of two buffers one is filled, one read."""

    def __init__(self, num_chains: int, device: torch.device, interval: int = 16) -> None:
        pinned = device.type == "cuda"  # reading the buffer of another accelerator waits for it
        home = None if pinned else device
        self._buffers = torch.zeros(2, interval, num_chains, device=home, pin_memory=pinned)
        self._steps = [[0] * interval, [0] * interval]
        self._events: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._filled = [False, False]
        self._interval = interval
        self._count = 0

    def record(self, values: Tensor, step: int) -> tuple[int, int, float] | None:
        """Store a step's numbers, () or (C,); return step, chain and value of an earlier non-finite one, or None."""
        half, place = divmod(self._count % (2 * self._interval), self._interval)
        bad = self._read(half) if place == 0 else None
        self._buffers[half, place].copy_(values.reshape(-1), non_blocking=True)
        self._steps[half][place] = step
        if place == self._interval - 1:
            self._filled[half] = True
            if self._events[half] is not None:
                self._events[half].record()
        self._count += 1
        return bad

    def drain(self) -> tuple[int, int, float] | None:
        """Return the first non-finite number among those not read yet, or None; synchronizes the device."""
        if self._events[0] is not None:
            torch.cuda.synchronize()
        newest = (self._count // self._interval) % 2
        self._filled = [True, True]
        first = self._read(1 - newest)
        return first if first is not None else self._read(newest)

    def _read(self, half: int) -> tuple[int, int, float] | None:
        if not self._filled[half]:
            return None
        self._filled[half] = False
        if self._events[half] is not None:
            self._events[half].synchronize()
        found = self._buffers[half].cpu()
        bad = (~found.isfinite()).nonzero()
        if len(bad) == 0:
            return None
        place, chain = bad[0].tolist()
        return self._steps[half][place], chain, found[place, chain].item()


# -- guard -------------------------------------------------------------------------------------------------------------

NonFiniteEnergy: TypeAlias = Literal["stop", "skip"]

SMALLER_STEP = "use a smaller lr, or clip the gradients (`sgmcmc tune` finds an lr)"
SMALLER_WARM_START = "use a smaller WarmStart(lr=…), or clip the gradients"

FEW = 20
"""Steps of a fit whose failure is laid on its start, if the last one diverged."""
SCALER_LIMIT = 200
"""Steps that a loss scaler may skip in a row: from any scale it reaches the smallest number earlier."""


class EnergyGuard:
    """Checks each energy before the update (on an accelerator some steps later), and decides about the update."""

    def __init__(
        self,
        chains: Chains,
        sampler: Sampler,
        trainer: pl.Trainer,
        nonfinite_energy: NonFiniteEnergy,
        max_skipped_in_a_row: int,
    ) -> None:
        self._chains = chains
        self._model = chains.model
        self._sampler = sampler
        self._trainer = trainer
        self._stops = nonfinite_energy == "stop"
        self._limit = max_skipped_in_a_row
        self._in_a_row = 0
        self._in_a_row_by_scaler = 0
        self._last_potential = chains.observed.mean_potential
        self._batch: Any = None
        self._shares_gradients = chains.layout.ranks_per_chain > 1
        # Chains of other processes must not take more steps than these.
        self._decides_together = chains.layout.is_spread and not self._stops
        self.has_scaler = has_loss_scaler(trainer)
        device = self._model.device
        runs_ahead = device.type != "cpu"  # so that reading a number waits
        self._deferred = DeferredCheck(chains.num_chains, device) if runs_ahead and self._stops else None
        # A rank with a bad energy sets its gradient to NaN (see `Chains.loss`), so that all ranks agree.
        self._looks_at_gradients = not self._stops or (self._shares_gradients and not runs_ahead)
        persistent = {name for name in self._model.state_dict() if not is_prior_state(name)}
        self._buffers = [b for name, b in self._model.named_buffers() if name in persistent]
        # A deferred check finds a bad step too late to undo it; a loss scaler undoes steps all the same. A checkpoint
        # of an error within a step is of the state before it.
        self._undoes = self._deferred is None or self.has_scaler or saves_on_exception(trainer)
        self._kept = [b.clone() for b in self._buffers] if self._undoes else []

    def begin(self, batch: Any) -> None:
        """Save the state that a step changes before its update: BatchNorm's running statistics."""
        self._batch = batch
        if self._kept:
            _copy(self._kept, self._buffers)

    def allows_update(self) -> bool:
        """Return whether the sampler may update."""
        potential = self._chains.observed.mean_potential
        if self._deferred is not None:
            bad = self._deferred.record(potential, self._sampler.step_count + 1)
            if bad is not None:
                self._stop_late(*bad)
            return True
        if self._looks_at_gradients:
            finite = all_finite(self._chains.gradients())
            if not self._shares_gradients:
                finite = finite and _is_finite(potential)
        else:
            finite = _is_finite(potential)
        if self._decides_together:
            finite = self._trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            self._last_potential = potential
            self._in_a_row = self._in_a_row_by_scaler = 0
            return True
        self._refuse(potential)
        return False

    def skipped_by_scaler(self) -> None:
        """Count a step that the loss scaler skipped: half precision overflowed, which is not an error."""
        if self._chains.observed.mean_potential is self._last_potential:
            return  # this guard skipped the step
        potential = self._chains.observed.mean_potential
        self._undo()
        self._in_a_row_by_scaler += 1
        if self._in_a_row_by_scaler >= SCALER_LIMIT:
            raise self._error(potential, f"the loss scaler has skipped {SCALER_LIMIT} steps in a row")

    def check_state(self, what: str) -> None:
        """Raise if a chain's state holds NaN or infinite numbers."""
        name = bad_tensor(dict(self._model.named_parameters()), dict(self._model.named_buffers()))
        if name is None:
            return
        chain = self._chains.first_bad(name)
        energies = self._chains.observed.energy
        index = self._chains.layout.chains.index(chain) if energies.numel() > 1 else 0
        raise self._state_error(name, what, chain, energies[index].item())

    def check_sample(self, sample: PosteriorSample) -> None:
        """Raise if a state that would be a sample holds NaN or infinite numbers."""
        name = bad_tensor(sample.parameters, sample.buffers)
        if name is not None:
            raise self._state_error(name, "it is not a valid sample", sample.chain, sample.energy)

    def _state_error(self, name: str, what: str, chain: int, energy: float) -> NonFiniteEnergyError:
        """Return the error for a chain's state whose tensor `name` is not finite."""
        step = self._sampler.step_count
        fault = f"'{name}' of chain {chain} holds NaN or infinite numbers after step {step} ({self._controls()})"
        return self._failure(f"{fault}, so {what}", self._smaller_step, step, chain, energy)

    def _failure(self, what: str, advice: str, step: int, chain: int, energy: float) -> NonFiniteEnergyError:
        message = f"{what}; {describe_checkpoint(self._trainer)}; {advice}"
        self._chains.has_diverged = True
        return NonFiniteEnergyError(message, step, chain, energy, last_good_checkpoint(self._trainer))

    def finish(self) -> None:
        """Check the remaining energies, and warn about skipped steps."""
        if self._deferred is not None:
            bad = self._deferred.drain()
            if bad is not None:
                self._stop_late(*bad)
        self.check_state("the run cannot end well")
        self._chains.has_diverged = False
        skipped = self._chains.counters.skipped_steps
        if skipped:
            rank_zero_warn(
                f"{skipped} steps were skipped because their energy or gradient was not finite; the schedule "
                "counts only completed steps, so the last planned samples may be missing."
            )

    # -- non-finite energies ------------------------------------------------------------------------------------------

    def _refuse(self, potential: Tensor) -> None:
        """Undo the step, and count it or stop the run."""
        cause, advice = self._diagnosis(potential)
        self._undo()
        lost = bad_tensor(dict(self._model.named_parameters()), {}) is not None
        if self._stops or lost:
            raise self._error(potential, cause, advice)
        counters = self._chains.counters
        counters.skipped_steps += 1
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise self._error(potential, f"{cause}, the {self._in_a_row}th time in a row", advice)
        if counters.skipped_steps == 1:
            rank_zero_warn(
                f"Step {self._sampler.step_count + 1} is skipped since {cause} ({self._controls()}); skipped "
                f"steps are counted, and {self._limit} in a row stop the run."
            )
        for logger in self._trainer.loggers:
            logger.log_metrics({"sampler/skipped_steps": counters.skipped_steps}, step=self._trainer.global_step)

    def leave_step(self) -> None:
        """Put the saved state back, after an error within a step and before its update."""
        if self._kept:
            _copy(self._buffers, self._kept)

    def _undo(self) -> None:
        self.leave_step()
        self._chains.observed.mean_potential = self._last_potential

    def _diagnosis(self, potential: Tensor) -> tuple[str, str]:
        """Return the cause and the remedy in words; called only after a failure."""
        lost = bad_tensor(dict(self._model.named_parameters()), {})
        if lost is not None and self._sampler.step_count == 0:
            return f"'{lost}' is NaN or infinite at the start", "correct the weights, the checkpoint or chain_start"
        if lost is not None:
            return f"'{lost}' became NaN or infinite in earlier steps", self._smaller_step
        if potential is self._last_potential:
            return (
                f"{type(self._model).__name__}.training_step has computed no energy for the gradient",
                "let it return super().training_step(batch, batch_idx)",
            )
        if self._chains.observed.batch_size == 0:
            return "the batch has no data", "leave out empty batches (in collate_fn or the batch sampler)"
        if not all(bool(t.isfinite().all()) for t in parts_in(self._batch, Tensor) if t.is_floating_point()):
            return "the batch holds NaN or infinite numbers", "clean the data, or pass nonfinite_energy='skip'"
        if not _is_finite(potential):
            try:
                low, *_ = check_batch(self._model, self._chains.stacked, self._batch)
            except ValueError as error:  # the likelihood says what is wrong with the targets
                return str(error), "correct the data, or pass nonfinite_energy='skip'"
            if math.isnan(low) and self._sampler.step_count == 0:
                return (
                    "the network's outputs have NaN at the start's finite weights and inputs",
                    "correct the network or its inputs, such as the logarithm of a standardised column",
                )
            value = _first_bad(potential)[1] * self._chains.observed.num_data
            return f"the energy is {value}", f"{self._smaller_step}, or pass nonfinite_energy='skip'"
        named = ((n, p.grad) for n, p in self._model.named_parameters() if p.grad is not None)
        name = first_not_finite(named)
        where = f"the gradient of '{name}'" if name is not None else "another rank's energy"
        return f"{where} is not finite", f"{self._smaller_step}, or pass nonfinite_energy='skip'"

    def _error(self, potential: Tensor, cause: str, advice: str = "keep the weights in range") -> NonFiniteEnergyError:
        step = self._sampler.step_count + 1
        index, value = _first_bad(potential)
        chain = self._chains.layout.chains[index]
        energy = value * self._chains.observed.num_data
        why = f"since {cause} (energy {energy:.6g}, {self._controls()})"
        return self._failure(f"the run stops before step {step} of chain {chain}, {why}", advice, step, chain, energy)

    def _stop_late(self, step: int, chain: int, mean_potential: float) -> None:
        energy, chain = mean_potential * self._chains.observed.num_data, self._chains.layout.chains[chain]
        message = (
            f"the energy of chain {chain} was {energy} at step {step} ({self._controls()}), so the run stops; the "
            f"parameters in memory are lost, but not samples and checkpoints: {describe_checkpoint(self._trainer)}; "
            f"{self._smaller_step}, or pass nonfinite_energy='skip'"
        )
        self._chains.has_diverged = True
        raise NonFiniteEnergyError(message, step, chain, energy, last_good_checkpoint(self._trainer))

    @property
    def _smaller_step(self) -> str:
        if self._chains.has_diverged and self._sampler.step_count < FEW and not self._trainer.ckpt_path:
            return "create the module again, since it begins where its last fit diverged"
        return SMALLER_STEP if self._chains.progress.warm_lr is None else SMALLER_WARM_START

    def _controls(self) -> str:
        warm_lr = self._chains.progress.warm_lr
        if warm_lr is not None:
            return f"WarmStart's lr {warm_lr:.6g}"
        group = self._sampler.param_groups[0]
        numbers = {name: torch.as_tensor(group[name]).reshape(-1)[0] for name in ("lr", "temperature")}
        return ", ".join(f"{name} {value.item():.6g}" for name, value in numbers.items())


def _is_finite(potential: Tensor) -> bool:
    return math.isfinite(potential.item() if potential.numel() == 1 else potential.sum().item())


def _first_bad(potential: Tensor) -> tuple[int, float]:
    """Return chain and value of the first number that is not finite, or of chain 0 if all are."""
    values: list[float] = potential.detach().reshape(-1).tolist()
    return next(((c, v) for c, v in enumerate(values) if not math.isfinite(v)), (0, values[0]))


def saves_on_exception(trainer: pl.Trainer) -> bool:
    """Return whether an error within a step is followed by a checkpoint."""
    return any(getattr(c, "save_on_exception", not hasattr(c, "save_top_k")) for c in trainer.checkpoint_callbacks)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
