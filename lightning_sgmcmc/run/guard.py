"""What happens when an energy is NaN or infinite: nothing of that step reaches parameters, samples or checkpoints."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.finite import all_finite, bad_tensor, first_not_finite
from lightning_sgmcmc.run.checkpoints import describe_checkpoint, last_good_checkpoint
from lightning_sgmcmc.run.deferred import DeferredCheck

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


NonFiniteEnergy: TypeAlias = Literal["stop", "skip"]

SMALLER_STEP = "take a smaller lr, or clip the gradients"

SCALER_LIMIT = 200
"""Steps that a loss scaler may skip in a row: from any scale it reaches the smallest number sooner."""


class NonFiniteEnergyError(RuntimeError):
    """A chain's energy, gradient or state has become NaN or infinite.

    Attributes:
        step: the optimizer step k = 1, 2, … that would have been made.
        chain: the chain's index.
        energy: Ũ of the step's mini-batch, in nats (finite where it is the gradient or the state that is not).
        checkpoint: the newest checkpoint of the run, all of whose numbers are finite, or None.
    """

    def __init__(self, message: str, step: int, chain: int, energy: float, checkpoint: Path | None) -> None:
        super().__init__(message)
        self.step = step
        self.chain = chain
        self.energy = energy
        self.checkpoint = checkpoint


class EnergyGuard:
    """Looks at each step's energy before its update, and says whether the update may be made.

    On a CPU the energy is read at every step, which costs nothing. On CUDA it is read some 16 to 32 steps later, so
    that the device is never waited for; parameters may have become NaN meanwhile, but samples and checkpoints are
    looked at exactly when they are made. A gradient that is not finite although the energy is shows in the next
    step's energy, since the prior sums over all parameters. With "skip", or several ranks, gradients are looked at
    before every update: on CUDA that waits for the device once a step.

    With several ranks the reduced gradients decide, so that all ranks decide alike: a rank whose energy is not finite
    makes its gradient NaN (see `visible_in_gradient`).

    Args:
        module: the module in training.
        trainer: its trainer.
        skipped: steps that were left out before, from a checkpoint.
    """

    def __init__(self, module: "BayesianModule", trainer: pl.Trainer, skipped: int = 0) -> None:
        self._module = module
        self._trainer = trainer
        self._stops = module.nonfinite_energy == "stop"
        self._limit = module.max_skipped_in_a_row
        self._in_a_row = 0
        self._in_a_row_by_scaler = 0
        self._state = module.chain_state
        self._state.skipped_steps = skipped
        self._last_potential = module.chain_state.mean_potential
        self._batch: Any = None
        self.shares_gradients = module.layout.ranks_per_chain > 1
        # Chains of other processes must not make more steps than these.
        self._decides_together = module.layout.is_spread and not self._stops
        self.has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._parameters = [p for group in module.sampler.param_groups for p in group["params"]]
        on_cuda = module.device.type == "cuda"
        self._deferred = DeferredCheck(module.num_chains, pinned=True) if on_cuda and self._stops else None
        self._looks_at_gradients = not self._stops or (self.shares_gradients and not on_cuda)
        persistent = set(module.state_dict())
        self._buffers = [b for name, b in module.named_buffers() if name in persistent]
        self._kept = [b.clone() for b in self._buffers]

    @property
    def skipped(self) -> int:
        """Steps that were left out, of this run and of those that it goes on from."""
        return self._state.skipped_steps

    def begin(self, batch: Any) -> None:
        """Keep what a step changes before its update: BatchNorm's running statistics."""
        self._batch = batch
        if self._buffers:
            _copy(self._kept, self._buffers)

    @staticmethod
    def visible_in_gradient(potential: Tensor) -> Tensor:
        """Return the potential itself, with a NaN gradient where it is not finite and bit for bit its own elsewhere."""
        return potential * (potential.detach() * 0 + 1)

    def admits(self) -> bool:
        """Return whether the sampler may make its update.

        Raises:
            NonFiniteEnergyError: if it may not, and the run should stop.
        """
        potential = self._state.mean_potential
        if self._deferred is not None:
            bad = self._deferred.note(potential, self._module.sampler.step_count + 1)
            if bad is not None:
                self._stop_late(*bad)
            return True
        if self._looks_at_gradients:
            finite = all_finite([p.grad for p in self._parameters if p.grad is not None])
            if not self.shares_gradients:
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
        """Take note of a step that the loss scaler left out: half precision overflowed, which is no fault.

        Raises:
            NonFiniteEnergyError: if it leaves out one after the other without end.
        """
        if self._state.mean_potential is self._last_potential:
            return  # it was this guard that left the step out
        potential = self._state.mean_potential
        self._undo()
        self._in_a_row_by_scaler += 1
        if self._in_a_row_by_scaler >= SCALER_LIMIT:
            raise self._error(potential, f"the loss scaler has left out {SCALER_LIMIT} steps in a row, so nothing is")

    def check_state(self, what: str) -> None:
        """Refuse a state that holds NaN or infinite numbers.

        Args:
            what: what would be made of it, for the message.

        Raises:
            NonFiniteEnergyError: if it does.
        """
        module = self._module
        name = bad_tensor(dict(module.named_parameters()), dict(module.named_buffers()))
        if name is not None:
            raise self.state_error(name, what)

    def state_error(self, name: str, what: str, chain: int | None = None) -> NonFiniteEnergyError:
        """Return the error for a state whose tensor `name` is not finite, of a chain or of the first that has it so."""
        if chain is None:
            chain = self._module.chain_with(name)
        step = self._module.sampler.step_count
        checkpoint = last_good_checkpoint(self._trainer)
        message = (
            f"'{name}' of chain {chain} holds NaN or infinite numbers after step {step} ({self._controls()}), so "
            f"{what}; "
            f"{describe_checkpoint(self._trainer)}; {SMALLER_STEP}"
        )
        energy = self._state.energy[self._module.layout.chains.index(chain) if self._state.energy.numel() > 1 else 0]
        return NonFiniteEnergyError(message, step, chain, energy.item(), checkpoint)

    def finish(self) -> None:
        """Look at what has not been looked at yet, and say how many steps were left out."""
        if self._deferred is not None:
            bad = self._deferred.rest()
            if bad is not None:
                self._stop_late(*bad)
        self.check_state("the run cannot end well")
        if self._state.skipped_steps:
            rank_zero_warn(
                f"{self._state.skipped_steps} steps were left out because their energy or gradient was not finite; the "
                "schedule counts the steps that were made, so samples planned for the last ones may be missing."
            )

    # -- what is done about it ----------------------------------------------------------------------------------------

    def _refuse(self, potential: Tensor) -> None:
        """Leave the step without a trace, and stop or count it."""
        cause, advice = self._diagnosis(potential)
        self._undo()
        lost = bad_tensor(dict(self._module.named_parameters()), {}) is not None
        if self._stops or lost:
            raise self._error(potential, cause, advice)
        self._state.skipped_steps += 1
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise self._error(potential, f"{cause}, the {self._in_a_row}th time in a row", advice)
        if self._state.skipped_steps == 1:
            rank_zero_warn(
                f"Step {self._module.sampler.step_count + 1} is left out since {cause} ({self._controls()}); such "
                f"steps are counted, and {self._limit} in a row stop the run."
            )
        for logger in self._trainer.loggers:
            logger.log_metrics({"sampler/skipped_steps": self._state.skipped_steps}, step=self._trainer.global_step)

    def _undo(self) -> None:
        if self._buffers:
            _copy(self._buffers, self._kept)
        self._state.mean_potential = self._last_potential

    def _diagnosis(self, potential: Tensor) -> tuple[str, str]:
        """Return what is not finite and what helps, in words; only called when something is wrong."""
        module = self._module
        lost = bad_tensor(dict(module.named_parameters()), {})
        if lost is not None:
            return (
                f"'{lost}' has become NaN or infinite by the steps before",
                "take a smaller lr, or clip the gradients",
            )
        if _first(~self._finite_inputs()):
            return "the batch holds NaN or infinite numbers", "clean the data, or pass nonfinite_energy='skip'"
        if not _is_finite(potential):
            value = _first_bad(potential)[1] * self._state.num_data
            return f"the energy is {value}", f"{SMALLER_STEP}, or pass nonfinite_energy='skip'"
        named = ((n, p.grad) for n, p in module.named_parameters() if p.grad is not None)
        name = first_not_finite(named)
        where = f"the gradient of '{name}'" if name is not None else "another rank's energy"
        return f"{where} is not finite", f"{SMALLER_STEP}, or pass nonfinite_energy='skip'"

    def _finite_inputs(self) -> Tensor:
        floating = [t for t in _tensors(self._batch) if t.is_floating_point()]
        return torch.tensor(all(bool(t.isfinite().all()) for t in floating))

    def _error(self, potential: Tensor, cause: str, advice: str = "keep the weights in range") -> NonFiniteEnergyError:
        step = self._module.sampler.step_count + 1
        index, value = _first_bad(potential)
        chain = self._module.layout.chains[index]
        energy = value * self._state.num_data
        message = (
            f"step {step} of chain {chain} is not made and the run stops, since {cause} (energy {energy:.6g}, "
            f"{self._controls()}); {describe_checkpoint(self._trainer)}; {advice}"
        )
        return NonFiniteEnergyError(message, step, chain, energy, last_good_checkpoint(self._trainer))

    def _stop_late(self, step: int, chain: int, mean_potential: float) -> None:
        energy, chain = mean_potential * self._state.num_data, self._module.layout.chains[chain]
        message = (
            f"the energy of chain {chain} was {energy} at step {step} ({self._controls()}), so the run stops; the "
            f"parameters in memory are lost, samples and checkpoints are not: {describe_checkpoint(self._trainer)}; "
            f"{SMALLER_STEP}, or pass nonfinite_energy='skip'"
        )
        raise NonFiniteEnergyError(message, step, chain, energy, last_good_checkpoint(self._trainer))

    def _controls(self) -> str:
        group = self._module.sampler.param_groups[0]
        numbers = {name: _first(torch.as_tensor(group[name])) for name in ("lr", "temperature")}
        return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def _is_finite(potential: Tensor) -> bool:
    return math.isfinite(potential.item() if potential.numel() == 1 else potential.sum().item())


def _first(tensor: Tensor) -> float:
    return tensor.reshape(-1)[0].item()


def _first_bad(potential: Tensor) -> tuple[int, float]:
    """Return chain and value of the first number that is not finite, or of chain 0 if all are."""
    values: list[float] = potential.detach().reshape(-1).tolist()
    return next(((c, v) for c, v in enumerate(values) if not math.isfinite(v)), (0, values[0]))


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
