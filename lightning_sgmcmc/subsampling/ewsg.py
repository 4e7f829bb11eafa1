"""The choice of a step's mini-batch: exponentially weighted stochastic gradients (EWSG), and their callback.

The functions take batch gradients `g_j` of the mean potential Ũ/N, with any leading axes (chains). A sampler's step is
`m' = (1-a)·m - b·g + s·ξ` (`lightning_sgmcmc.samplers.StepLaw`); without momentum a = 0 and m is the parameter itself.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import ChainSizes, Place, Run, StepClaimant, refuse_loss_scaler
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.row_steps import GradientChoice
from lightning_sgmcmc.chains.trainer import instances_of, is_logged, log_cost, log_scalars
from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler, StepLaw
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.subsampling.control_variates import rows_of
from lightning_sgmcmc.tensors import Control, exact, sent, square_root, widest, widest_dtype

GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler

Guess: TypeAlias = Literal["unchanged", "stopped", "zero", "one"]
"""The guess of the momentum after the step, m', which eq. (4) needs before it is known.

"unchanged" is m' = m, so x = a·m/s (the paper's √h·γ·r/σ, and its choice; 0 without momentum). "stopped" is m' = 0, so
x = (a-1)·m/s. "zero" and "one" set x itself.
"""


def index_log_weights(gradients: Tensor, momentum: Tensor | None, law: StepLaw, guess: Guess) -> Tensor:
    """Return log p_j of each candidate batch up to a constant: ½‖x + b·g_j/s‖² - ½‖x‖².

    Args:
        gradients: g_j of each candidate, shape (…, J, d).
        momentum: m, shape (…, d); None without momentum.
        law: a, b and s² of the step, numbers or tensors of shape (…).
        guess: the choice of x, see `Guess`.

    Returns:
        shape (…, J), float64; zeros where s² = 0, since the step then has no law to match.

    Source: Li et al. 2021 (EWSG), eq. (4) and (6), appendices D and E.
    """
    damping, force, variance = map(_along_candidates, (law.damping, law.force, law.variance))
    inverse: Control
    if isinstance(variance, Tensor):
        inverse = torch.where(variance > 0, 1 / variance, 0.0)
    else:
        inverse = 1 / variance if variance > 0 else 0.0
    wide = widest_dtype(gradients.device)
    weights = torch.linalg.vector_norm(gradients, dim=-1, dtype=wide).square() * (force * force * inverse / 2)
    if guess == "one":
        weights += gradients.sum(-1, dtype=wide) * (force * square_root(variance) * inverse)
    elif guess != "zero" and momentum is not None:
        factor = damping if guess == "unchanged" else damping - 1
        weights += (gradients @ momentum[..., None])[..., 0] * (force * factor * inverse)
    return weights


def _along_candidates(control: Control) -> Control:
    return widest(control)[..., None] if isinstance(control, Tensor) else control


def metropolis_index(log_weights: Tensor, log_uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Run a Metropolis chain over the candidates, from the first: j replaces i with probability min{1, p_j/p_i}.

    Args:
        log_weights: log p of each candidate, shape (…, M+1); a candidate with a NaN weight is rejected.
        log_uniforms: logarithms of uniform numbers, shape (…, M).

    Returns:
        the final index and the number of accepted candidates, each of shape (…), int64.

    Source: Li et al. 2021 (EWSG), eq. (6) and Algorithm 1.
    """
    present, *candidates = log_weights.unbind(-1)
    index = accepted = torch.zeros_like(present, dtype=torch.int64)
    for candidate, (proposed, chance) in enumerate(zip(candidates, log_uniforms.unbind(-1), strict=True), 1):
        accepts = chance < proposed - present
        present = torch.where(accepts, proposed, present)
        index = torch.where(accepts, candidate, index)
        accepted = accepted + accepts
    return index, accepted


# -- the chains of a fit -----------------------------------------------------------------------------------------------


STEPS_DRAWN = 256
"""Steps whose uniform numbers are drawn at once; changing it changes the results of a seed."""


class IndexChains:
    """The Metropolis chains over the candidates of each step of a fit, see `GradientChoice`.

    Attributes:
        accepted: accepted proposals since they were last set to 0, shape (C,).
        proposed: all proposals since then.
    """

    def __init__(
        self, num_proposals: int, guess: Guess, seed: int, chains: Sequence[int], device: torch.device
    ) -> None:
        self.settings: str = guess
        self.candidates = num_proposals + 1
        self.accepted = torch.zeros(len(chains), dtype=torch.int64, device=device)
        self.proposed = 0
        self._guess: Guess = guess
        self._seed = seed
        self._chains = chains
        self._each_chain = torch.arange(len(chains), device=device)
        self._drawn: tuple[int, Tensor] | None = None

    def log_uniforms(self, step: int) -> Tensor:
        """Return logarithms of uniform numbers for a step, functions of (seed, chain, step) alone, shape (C, M)."""
        block, place = divmod(step, STEPS_DRAWN)
        if self._drawn is None or self._drawn[0] != block:
            rows = []
            for chain in self._chains:
                generator = torch.Generator().manual_seed(derive_seed(self._seed, "index chain", chain, block))
                rows.append(torch.rand(STEPS_DRAWN, self.candidates - 1, generator=generator))
            self._drawn = (block, sent(exact(torch.stack(rows, 1).log()), self.accepted.device))
        return self._drawn[1][place]

    def chances(self, first: int, data: Tensor) -> Tensor:
        """Return `log_uniforms` of steps, infinite for what is no candidate: that with less data than the first, and
        those after it."""
        found = torch.stack([self.log_uniforms(first + step) for step in range(len(data))])
        is_whole = (data >= data[:, :1]).cummin(1).values[:, None, 1:]
        return torch.where(is_whole, found, math.inf)

    def choose(
        self, rule: Sampler, groups: Sequence[dict[str, Any]], gradients: Tensor, chances: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen of some gradients, shape (C, J, d), and how many proposals each chain accepts."""
        weights = self._log_weights(rule, groups, gradients)
        index, accepted = metropolis_index(weights, chances)
        chosen = gradients[self._each_chain, index]
        # Bit for bit the candidate's; NaN if any candidate is not finite, so that every rank refuses the step.
        chosen.mul_((weights.sum(1) * 0 + 1).to(chosen.dtype)[:, None])
        return chosen, accepted

    def end(self, chances: Tensor, counted: Tensor) -> None:
        """Count the proposals of steps."""
        self.accepted += counted
        self.proposed += int((chances < math.inf).sum())

    def _log_weights(self, rule: Sampler, groups: Sequence[dict[str, Any]], candidates: Tensor) -> Tensor:
        """Return log p of each candidate up to a constant, shape (C, J), for gradients of shape (C, J, d)."""
        sizes = [sum(p.numel() for p in group["params"]) // len(candidates) for group in groups]
        found = []
        for group, part in zip(groups, candidates.split(sizes, -1), strict=True):
            law = rule.law(group)
            assert law is not None
            momenta = rule.momenta(group) if self._guess in ("unchanged", "stopped") else None
            momentum = None if momenta is None else rows_of(momenta, len(part))
            found.append(index_log_weights(part, momentum, law, self._guess))
        return functools.reduce(torch.add, found)


# -- callback ----------------------------------------------------------------------------------------------------------


class EWSG(StepClaimant):
    """Chooses each step's mini-batch among M+1, so that the step's law is close to that with the full gradient.

    The step takes the next M+1 batches of the loader. A Metropolis chain starts at the first and replaces batch i
    by batch j with probability

        min{1, exp(½‖x + n̂a_j‖² - ½‖x + n̂a_i‖²)},   n̂a_j = √h·∇Ũ_j/σ,   σ² = 2γτ,   x = √h·γ·r/σ

    and the sampler receives the gradient of the final batch (for other samplers, h, γ and σ are those of their step,
    see `lightning_sgmcmc.samplers.StepLaw`). `Ũ_j` includes the prior and the gradient multiplier. Each chain chooses
    independently. Candidates are disjoint within an epoch if a datamodule's batches are, whereas the paper draws each
    independently.

    A step costs M+1 gradients: it uses Lightning's accumulation over M+1 times `accumulate_grad_batches`, so epochs
    are still one pass over the data, with fewer steps. Each candidate has `accumulate_grad_batches` micro-batches;
    data-parallel ranks share each candidate. The last step of an epoch may have fewer candidates; a last batch with
    fewer data than the others has a noisier gradient, so it is a candidate only if it is alone. The energy of a step is
    the mean over all its batches. Gradients are clipped after the choice. While the temperature is the number 0 there
    is no law to match: the step then uses the mean gradient of all its batches, as with accumulation. M+1 gradients per
    chain are kept in memory.

    Every `trainer.log_every_n_steps` it logs `ewsg/acceptance`, the share of proposals accepted since the last log,
    `sampler/gradient_evaluations` (per-datum gradients, for each chain) and `sampler/data_passes`, that number over N.

    To first order in h and with "unchanged", EWSG acts as a friction of h·cov/(2τ), with cov the covariance of the
    batches' ∇Ũ, which removes heat from their noise. It also prefers large gradients, and shifts the law if their
    distribution is skewed. `recipes/ewsg_gaussian.py`, `covertype_logistic.py` and `misspecified.py` show where it
    helps and where it does not.

    With `CovarianceFriction` it is EWSG-VR; with `ControlVariates` the candidates' gradients are the corrected ones.

    Args:
        num_proposals: M ≥ 0, the length of the Metropolis chain; 0 is the plain sampler, bit for bit, with a warning.
        guess: x's assumption about the momentum after the step: "unchanged" (the paper's choice, above; x = 0 without
            momentum), "stopped", x = (-1+hγ)·r/(σ√h), or x itself, "zero" or "one".

    Raises:
        ValueError: for an argument out of range; at setup, for a loss scaler, a `GradientAccumulationScheduler`, or
            another callback that chooses gradients; when training starts, for a sampler whose step has another form
            (pSGLD), or an epoch with fewer batches than a step needs.

    Source: Li et al. 2021 (EWSG), Algorithm 1, eq. (6), Figure 1b, appendices D and E.
    """

    changes_chain = True
    place = Place.CHAIN
    setting = "ewsg"
    claims: ClassVar[Mapping[str, str | None]] = {"choose gradient": "_choose"}

    def __init__(self, num_proposals: int = 1, guess: Guess = "unchanged") -> None:
        check_count("num_proposals", num_proposals, least=0, optional=False)
        if num_proposals == 0:
            rank_zero_warn("EWSG has no effect: num_proposals=0 leaves it one batch to choose from; pass 1 or more.")
        check_choice("guess", guess, get_args(Guess))
        self.num_proposals = num_proposals
        self.guess = guess
        self._given_accumulation: int | None = None
        self.reset()

    def reset(self) -> None:
        self._gradients: Tensor | None = None
        """The candidates' gradients of this step, shape (C, M+1, d)."""
        self._filled = 0
        self._data: list[int] = []
        """Data of each candidate of this step, and of the present one so far, in this process."""
        self._data_so_far = 0
        self._has_gradient: list[bool] = []
        """Whether any candidate of this step has a gradient, for each parameter."""
        self._index: IndexChains | None = None

    # -- before a run -------------------------------------------------------------------------------------------------

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        if self.num_proposals == 0:
            return
        if instances_of(trainer, GradientAccumulationScheduler):
            raise ValueError(
                "EWSG uses the batches of a step as candidates, but a GradientAccumulationScheduler changes their "
                "number: set the trainer's accumulate_grad_batches instead"
            )
        refuse_loss_scaler(trainer, "EWSG compares gradients")
        self._given_accumulation = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches *= self.num_proposals + 1

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        module = run.module
        self._check_sampler(run.trainer, run.sampler)
        run.chains.accumulation.candidates = self.num_proposals + 1
        self._parameters = [p for group in run.sampler.param_groups for p in group["params"]]
        self._sizes = [p.numel() // module.num_chains for p in self._parameters]
        self._has_gradient = [False] * len(self._parameters)
        seed, chains = run.sampler.seed, run.layout.chains
        self._index = IndexChains(self.num_proposals, self.guess, seed, chains, module.device)
        if saved:
            self._restore(saved)

    def _check_sampler(self, trainer: pl.Trainer, sampler: Sampler) -> None:
        if self.num_proposals == 0:
            return
        rule = type(sampler).__name__
        group = sampler.param_groups[0]
        if sampler.plain_law(group) is None:
            raise ValueError(
                f"EWSG needs the law of a step before it chooses a gradient, but {rule}'s depends on the gradient "
                "itself: use another sampler"
            )
        if self.guess == "stopped" and sampler.momenta(group) is None:
            raise ValueError(f"guess='stopped' concerns a momentum, but {rule} has none: use 'unchanged'")
        batches = trainer.num_training_batches
        if batches < trainer.accumulate_grad_batches:
            raise ValueError(
                f"a step of EWSG needs {trainer.accumulate_grad_batches} batches, but an epoch has {batches:.0f}: use "
                "fewer proposals, or smaller batches"
            )

    def memory(self, sizes: ChainSizes) -> int:
        return (self.num_proposals + 1 if self.num_proposals else 0) * sizes.parameters

    # -- a step -------------------------------------------------------------------------------------------------------

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.num_proposals == 0:
            return
        chains, sampler = self.run.chains, self.run.sampler
        state = chains.accumulation
        self._data_so_far += chains.observed.batch_size
        if not state.batch_complete:
            return
        data, self._data_so_far = self._data_so_far, 0
        if not any(sampler.is_noisy(group) for group in sampler.param_groups):
            return  # the gradients add up to their mean
        row, gradients = self._next_row(data), []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._has_gradient[place] |= gradient is not None
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
        rows_of(gradients, chains.num_chains, out=row)
        if state.accumulating:  # the last one is reduced by the backward pass itself
            if self.run.layout.ranks_per_chain > 1:
                row.copy_(self.run.layout.mean_over_data(row))
            pl_module.optimizer_zero_grad(trainer.current_epoch, trainer.fit_loop.batch_idx, sampler)
        row.mul_(1 / state.batch_share)

    def _next_row(self, data: int) -> Tensor:
        """Return the buffer for the gradient of the next candidate, which has this many data, shape (C, d)."""
        if self._gradients is None:
            first = self._parameters[0]
            shape = (self.num_proposals + 1, self.run.layout.num_chains, sum(self._sizes))
            self._gradients = torch.empty(shape, dtype=first.dtype, device=first.device)
        self._filled += 1
        self._data.append(data)
        return self._gradients[self._filled - 1]

    def _choose(self, trainer: pl.Trainer) -> None:
        """Choose one of the step's candidates, and write its gradient to the parameters."""
        if self._filled == 0:
            return
        assert self._gradients is not None
        assert self._index is not None
        count = next((place for place, data in enumerate(self._data) if data < self._data[0]), self._filled)
        candidates, sampler = self._gradients[:count].transpose(0, 1), self.run.sampler
        chances = self._index.log_uniforms(sampler.step_count)[:, : count - 1]
        chosen, accepted = self._index.choose(sampler, sampler.param_groups, candidates, chances)
        self._index.accepted += accepted
        self._index.proposed += chances.numel()
        self._write_gradients(chosen)
        self._filled, self._data = 0, []

    def _write_gradients(self, chosen: Tensor) -> None:
        """Write the gradients of the chosen batches, shape (C, d), to the parameters."""
        present: list[Tensor] = []
        sources: list[Tensor] = []
        pieces = chosen.split(self._sizes, 1)
        for parameter, piece, has in zip(self._parameters, pieces, self._has_gradient, strict=True):
            if not has:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            present.append(parameter.grad)
            sources.append(piece.reshape(parameter.shape))
        torch._foreach_copy_(present, sources)
        self._has_gradient = [False] * len(self._parameters)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_logged(trainer, self.run.chains, self.run.sampler.step_count):
            return
        log_cost(trainer, self.run.chains)
        index = self._index
        if index is not None and index.proposed:
            log_scalars(trainer, {"ewsg/acceptance": index.accepted.sum().item() / index.proposed}, trainer.global_step)
            index.accepted.zero_()
            index.proposed = 0

    def acts_in(self, step: int) -> bool:
        return False

    def step_choice(self) -> GradientChoice | None:
        return self._index if self.num_proposals else None

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore_accumulation(trainer)
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_accumulation(trainer)  # the candidates may still be saved

    def _restore_accumulation(self, trainer: pl.Trainer) -> None:
        if self._given_accumulation is not None:
            trainer.accumulate_grad_batches, self._given_accumulation = self._given_accumulation, None

    def end(self) -> None:
        self._gradients = self._index = None
        self._filled, self._data = 0, []
        self._parameters = []

    def state(self) -> dict[str, Any]:
        if self._index is None:
            return {}
        candidates = None
        if self._filled and self._gradients is not None:  # in the middle of a step
            candidates = self.run.layout.gather(self._gradients[: self._filled], dim=1).cpu()
        return {
            "candidates": candidates,
            "data": list(self._data),
            "data_so_far": self._data_so_far,
            "has_gradient": list(self._has_gradient),
            "accepted": int(self._index.accepted.sum()),
            "proposed": self._index.proposed,
            "num_proposals": self.num_proposals,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint's state."""
        if state["num_proposals"] != self.num_proposals:
            raise ValueError(
                f"the checkpoint's run has num_proposals={state['num_proposals']}, this one {self.num_proposals}: "
                "resume with the same number"
            )
        assert self._index is not None
        self._index.accepted[0] += state["accepted"]
        self._index.proposed = state["proposed"]
        self._data_so_far = state.get("data_so_far", 0)
        if state["candidates"] is not None:
            self._has_gradient = state["has_gradient"]
            rows = self.run.layout.own(state["candidates"], dim=1)
            for row, data in zip(rows, state.get("data", [0] * len(rows)), strict=True):
                self._next_row(data).copy_(row)
