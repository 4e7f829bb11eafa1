"""Blocks of steps: what Lightning does around a step of a small network takes longer than the step.

A block makes the steps up to the next one that Lightning must see in a loop of its own. They are the steps that
Lightning would make: the same batches, controls, noise and calls of this library's callbacks, in the same order. What
has no effect in them is left out: contexts of profilers, hooks that nobody defines, the collection of metrics that
nobody logs. The gradient comes from traced operations (`chains.traced`), for all chains at once, so the numbers are
those of other steps up to rounding. Lightning's counts of batches and steps go on, and a block ends with the step after
which Lightning validates, logs, saves or shows its progress, or an epoch ends that it sees (`passes`).

A run with a part that acts at every step, such as a user's callback with `on_train_batch_end`, has no blocks.
"""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.compiled_step import CompiledSteps, can_be_made_at_once, captures
from lightning_sgmcmc.chains.energies import ChainEnergies
from lightning_sgmcmc.chains.listed_steps import ListedSteps
from lightning_sgmcmc.chains.row_steps import Batches, Choices, Controls, ControlVariate, GradientChoice, StepPart
from lightning_sgmcmc.chains.traced import NotTraceableError
from lightning_sgmcmc.chains.trainer import declared
from lightning_sgmcmc.chains.weights import LAST
from lightning_sgmcmc.fit.block_runs import (
    MOST_CONVOLUTIONS,
    NOT_MADE,
    WORTH_LEARNING,
    Attributes,
    acts_in_steps,
    compiles,
    expected_steps,
    has_hooks,
    numbers_of,
    overrides,
    runs_apart,
    say_compilation,
    why_no_blocks,
)
from lightning_sgmcmc.fit.checks import take_num_data
from lightning_sgmcmc.fit.passes import (
    ComingControls,
    DataOnDevice,
    HiddenEpochs,
    NextSeen,
    RowsOfPass,
    Taken,
    rows_of_pass,
)
from lightning_sgmcmc.fit.prior_state import PriorScales
from lightning_sgmcmc.fit.single_steps import Made, SingleSteps
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.tensors import Control, sent

LONGEST = 0.2
"""Seconds after which a block ends, so that progress bars and signals are attended to."""
SINGLE = 1_000
"""Steps made one by one after which a sentence says why."""
EACH_IS_SEEN = (
    "each is followed by a log, a checkpoint, a validation, a sample or an epoch's end: let these come less often"
)
"""Why steps are single where Lightning sees all of them."""
FEW_FORMS = 16
"""Forms of epochs whose weights are kept."""
MOST, MOST_NORMAL, MOST_OF_DATA = 512, 2**22, 2**26
"""Steps of a block, normal numbers that are drawn for it at once, and numbers of its batches."""
MOST_APART = 32
"""Steps of a block of chains one after another, which draw a step's noise at a time."""


SETTINGS = "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches"
"""The trainer's settings that a block's steps are made by."""


class Segment(NamedTuple):
    """Steps of one epoch that are made at once, alone or with those of the epochs before.

    Attributes:
        taken: their batches.
        factors: the factor of each batch, see `DataWeights`.
        controls: those of each group.
        form: what these are, the same in all steps.
        first: the first batch's place in its epoch.
        begun: the sampler's steps before.
    """

    taken: Taken
    factors: list[float | None]
    controls: list[Controls]
    form: Any
    first: int
    begun: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.controls[0].lr)


class StepBlocks:
    """Makes a fit's steps in the place of Lightning's loop."""

    def __init__(self, trainer: pl.Trainer, module: ChainModel, scales: PriorScales | None) -> None:
        self._trainer: Any = trainer
        self._module, self._sampler = module, sampler_of(module)
        self._scales = scales
        self._weights: dict[Any, Tensor] = {}
        """Weights of the data of some steps, by what they depend on."""
        self._waiting: list[Segment] = []
        """Steps of epochs that have ended, which are counted and are yet to be made, with those that follow."""
        self._waits = 0
        """The number of steps that wait."""
        self._alike_to = 0
        """The last step that is like those that wait: with their controls, and free for all that its number says."""
        self._parts: list[StepPart] = []
        """What a callback does in each of the coming steps; at most one does."""
        self._variate: ControlVariate | None = None
        """What corrects their gradients and energies."""
        self._choice: GradientChoice | None = None
        """What chooses their gradients."""
        self._acting = acting = [callback for callback in declared(trainer) if acts_in_steps(callback)]
        self._with_part = [own for own in acting if overrides(own, "step_part")]
        self._with_variate = [own for own in acting if overrides(own, "step_variate")]
        self._with_choice = [own for own in acting if overrides(own, "step_choice")]
        self._singles = SingleSteps(trainer, module, self._acting, scales)
        self._each = self._singles.each
        """Batches of a step."""
        self._coming = ComingControls(trainer, module, self._acting)
        self._compiles = compiles(module, expected_steps(trainer, module), self._acting)
        self._lists = True
        """Whether steps may be listed where they are not compiled."""
        self._cause: str | None = None
        """What keeps the coming step from being made with others."""
        self._single = 0.0
        """Steps in a row that such a cause made single; -∞ once it is reported."""
        self._epochs = HiddenEpochs(trainer, module)
        self._data = DataOnDevice(module.device)
        self._next_seen = NextSeen(trainer, self._coming, self._epochs)
        self._compiled: CompiledSteps | None = None
        self._listed: ListedSteps | None = None
        """What makes the steps, from the first on that are made at once; those of a stand-in are listed."""
        self._captures = captures(module.device)
        """Whether steps are captured, with what draws their noise."""
        numbers = numbers_of(module) * max(1, self._sampler.draws)
        self._apart = runs_apart(trainer, module)
        """Whether steps are those of one chain after another."""
        most = MOST if self._captures else max(1, min(MOST, MOST_NORMAL // numbers))
        self._most = max(most, MOST_APART) if self._apart else most
        """Steps of a block."""
        self._settings = {name: getattr(trainer, name) for name in SETTINGS}
        self._looks = True
        """Whether to look for a change before the coming step."""
        self._watch = module.other_weights
        self._attributes = Attributes(module)
        self._counters = module.chains.counters
        loop: Any = trainer.fit_loop.epoch_loop
        self._loop, self._plain = loop, loop.advance
        loop.advance = self._advance

    @classmethod
    def begun(cls, trainer: pl.Trainer, module: ChainModel, scales: PriorScales | None) -> "StepBlocks | None":
        """Take the place of the loop's `advance`, when a fit's energies are ready; None for a fit without blocks.

        Args:
            scales: draws the prior's scales between steps, if it has some.
        """
        chains = module.chains
        if not chains.traces:
            return None
        sampler = sampler_of(module)
        for group in [] if sampler.flat is None else sampler.flat.groups:
            group.take(sampler.state)  # of a checkpoint, so that the first step is made as in a run without it
        return cls(trainer, module, scales)

    @property
    def is_ready(self) -> bool:
        """Whether steps are made as the rest of the run's will be."""
        return not (self._compiles or self._captures) or self._compiled is not None

    @property
    def _compiles_now(self) -> bool:
        """Whether the coming steps are compiled or captured, if they are made at once."""
        return (self._compiles or self._captures) and self._sampler.stand_in is None

    def end(self) -> None:
        """Give Lightning's loop its own method back."""
        vars(self._loop).pop("advance", None)

    def _advance(self, fetcher: Any) -> None:
        """Make the steps up to the next one that Lightning sees; a user's hooks are called between its epochs."""
        watch = self._watch
        watch.compare()
        if self._looks and self._singles.begins(self._loop.batch_idx + 1):
            # The hooks of users have been called, which may change what a block takes as given.
            self._looks = watch.has_hooks
            if (cause := self._change() or why_no_blocks(self._trainer, self._module)) is not None:
                self._end_blocks(cause)
                self._plain(fetcher)
                return
            if watch.has_hooks and self._attributes.have_changed():
                self._singles.check_next()
        self._make_steps(fetcher)
        if fetcher.done:
            watch.keep(self._sampler, ends_epoch=True)

    def _change(self) -> str | None:
        """Return which of the trainer's settings is another one since the steps began."""
        changed = (name for name, value in self._settings.items() if getattr(self._trainer, name) != value)
        return next((f"{name} was changed within the fit: pass it to the Trainer" for name in changed), None)

    def _end_blocks(self, cause: str) -> None:
        """Let Lightning make the coming steps, for a cause that has come up within the fit."""
        self.end()
        chains = self._module.chains
        self._compiles = self._captures = chains.traces = False
        chains.flatten(self._sampler, self._trainer)
        chains.stop_tracing(self._trainer)
        step = self._sampler.step_count + 1
        rank_zero_info(f"{NOT_MADE}{f' from step {step} on' if step > 1 else ''}, since {cause}.")

    def _make_steps(self, fetcher: Any) -> None:
        """Make the steps up to the next one that Lightning sees, and this one too, with all its hooks."""
        loop = self._loop
        if loop.restarting and loop._should_check_val_fx(fetcher):
            if loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last:
                self._plain(fetcher)  # which makes no step
                return
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        source = rows_of_pass(fetcher)
        begun = time.monotonic()
        self._next_seen.begin()
        while True:
            if loop.batch_idx + 1 >= self._trainer.num_training_batches:
                self._turn(fetcher)
                source = rows_of_pass(fetcher)
            late, index = time.monotonic() - begun > LONGEST, loop.batch_idx + 1
            begins, ends = self._singles.begins(index), self._singles.ends(index)
            # Which steps are compiled does not depend on time, since their rounding does on it.
            free = self._free_steps(source, late) if begins else (0, False)
            if source is not None and free[0]:
                self._note_single(EACH_IS_SEEN if free == (1, True) else None)
                if self._make_block(source, *free):
                    return
                continue
            self._make_waiting()
            is_seen = ends and self._next_seen.within(1, late)[1]
            if ends:
                self._note_single(self._cause or (EACH_IS_SEEN if is_seen else None))
            batch = self._sent(next(fetcher)[0])
            loop.batch_progress.is_last_batch = fetcher.done
            if is_seen:
                self._singles.make_seen(batch, index)
                return
            self._singles.make_hidden(batch, index)
            if self._trainer.should_stop:
                loop._batches_that_stepped -= ends  # which Lightning counts itself
                return

    def _turn(self, fetcher: Any) -> None:
        """End the present epoch and begin the next one; steps that wait are made with the data's N of their epoch."""
        num_data = self._sampler.num_data
        self._epochs.turn(fetcher)
        grown = self._sampler.num_data
        if self._waiting and num_data is not None and grown is not None and grown != num_data:
            take_num_data(self._module, num_data)
            self._make_waiting()
            take_num_data(self._module, grown)

    # -- compiled steps -----------------------------------------------------------------------------------------------

    def _free_steps(self, source: RowsOfPass | None, late: bool) -> tuple[int, bool]:
        """Return how many of the coming steps no callback acts in, and whether Lightning sees the last of them.

        The first steps of a run are not among them, in which its batches are looked at.

        Args:
            source: the batches, if they are rows of tensors in memory.
        """
        chains, sampler = self._module.chains, self._sampler
        seen = self._next_seen
        if self._are_alike(seen.left) and source is not None and not late and seen.hides_epoch():
            return seen.left, False
        at_once, self._cause = self._compiles_now or self._lists, None
        if not (chains.traces and at_once and sampler.step_count >= LAST) or chains.energies is None:
            return 0, False
        self._coming.apply(sampler.step_count + 1)  # parts depend on the coming temperature
        acting = {callback: part for callback in self._with_part if (part := callback.step_part()) is not None}
        self._parts = [*acting.values()]
        variates = (own.step_variate() for own in self._with_variate)
        self._variate = next((variate for variate in variates if variate is not None), None)
        choices = (own.step_choice() for own in self._with_choice)
        self._choice = next((choice for choice in choices if choice is not None), None)
        is_scaled = any(part.scales for part in self._parts)
        if not can_be_made_at_once(sampler, is_scaled) or (sampler.stand_in is not None and (acting or self._choice)):
            if sampler.stand_in is None and not any(map(sampler.sets_options, sampler.param_groups)):
                self._cause = (
                    f"{type(sampler).__name__} updates more than rows of numbers: set elementwise=True in its class "
                    "if it treats each coordinate alone"
                )
                if not sampler._updates_rows():  # else it may later
                    self._leave(self._cause)
            return 0, False
        self._cause = self._obstacle([*acting], source is not None)
        if self._cause is not None or source is None:
            self._leave(self._cause)
            return 0, False
        if self._waits == 0:
            self._most = max(1, min(self._most, MOST_OF_DATA // source.numbers))
        most = max(1, self._most - self._waits)
        if self._scales is not None:
            most = int(min(most, self._scales.distance))
            if most == 0:
                return 0, False
        count, is_seen = self._next_seen.within(most, late)
        first = sampler.step_count + 1
        for callback in self._acting:
            free = callback.free_steps(first, count)
            if free == 0 < count:
                self._cause = f"{type(callback).__name__} acts in each: remove it to make many steps at once"
            count, is_seen = free, is_seen and free == count
        return count, is_seen

    def _obstacle(self, acting: Sequence[RunCallback], are_rows: bool) -> str | None:
        """Return what keeps a run's steps from being made together, and what to do about it; None for nothing.

        Args:
            acting: the callbacks with a part in the coming steps.
            are_rows: whether batches are rows of tensors in memory.
        """
        weights = self._module.chains.weights
        if not are_rows:
            return "batches are made row by row: use a TensorDataset, or a datamodule without augmentation"
        if self._choice is not None and self._singles.clip is not None:
            clips = f"gradient_clip_val={self._trainer.gradient_clip_val}"
            return f"{clips} comes after another callback's choice: pass None, and a smaller lr"
        if self._choice is not None and (acting or self._variate is not None):
            other = next(own for own in self._acting if own in acting or own.step_variate() is not None)
            name = type(other).__name__
            return f"{name} changes gradients among which another callback chooses: remove one of the two"
        if len(acting) > int(self._compiles_now):
            name = type(acting[-1]).__name__
            return f"{name} learns in each: {WORTH_LEARNING:,} steps or more are compiled with it"
        if has_hooks(self._sampler, self._scales, *self._acting):
            return "the sampler has a hook: remove it, and use a hook of epochs"
        if weights is None or not weights.counts_rows:  # a short batch is filled up, so an example must be a row
            return "the likelihood counts other data than rows: return one number for each row"
        return None

    def _leave(self, cause: str | None) -> None:
        """Let steps that cannot be captured, for a cause that stays, be those of a fit without blocks.

        Such a fit may compile its network.
        """
        if self._captures:
            self._captures = self._lists = False
            self._module.chains.stop_tracing(self._trainer)
            rank_zero_info(f"{NOT_MADE}, since {cause}.")

    def _note_single(self, cause: str | None) -> None:
        """Report once what keeps steps from being made together, after many in a row that it made single."""
        self._single = min(self._single, 0.0) if cause is None else self._single + 1
        if self._single == SINGLE:
            self._single = -math.inf
            rank_zero_info(f"Steps are made one by one, since {cause}.")

    def _make_block(self, source: RowsOfPass, count: int, is_seen: bool) -> bool:
        """Make some steps by a compiled function, or one after another, if it cannot make them; return whether
        Lightning has seen the last. Steps that end an epoch may wait for those of the next one."""
        controls, possible, form = self._controls(count)
        count, is_seen = possible, is_seen and possible == count
        index, singles = self._loop.batch_idx + 1, self._singles
        taken = source.take(min(count * self._each, self._trainer.num_training_batches - index), self._each)
        coming = Segment(taken, self._factors(index, taken.count), controls, form, index, self._sampler.step_count)
        sizes = taken.sizes
        if self._waiting and not self._goes_on(coming):
            self._make_waiting()
            self._coming.apply(self._sampler.step_count + count)
        if not is_seen and source.is_done and sizes and self._may_wait(count):
            self._waiting.append(coming)
            self._waits += count
            singles.count_over(sizes, index, count, 1, controls)
            if self._waits == count:
                self._alike_to = self._last_alike(coming.begun)
            return False
        segments = [*self._take_waiting(), coming]
        energies = self._computed(segments, self._variate, self._parts) if sizes else None
        gradients = 2 if self._variate is not None and self._variate.gradient is not None else 1
        if energies is not None:
            if count > is_seen:
                last = taken.batches_of(count - 1 - is_seen)[-1]
                singles.count_over(sizes[: last + 1], index, count - is_seen, gradients, controls)
                singles.record(energies[0 if is_seen else 1], sizes[last])
            if is_seen:
                begun = taken.batches_of(-1)[0]
                singles.count_over(sizes[begun:-1], index + begun, 0, gradients, controls)
        else:
            self._make_counted(segments[:-1])
        for place in range(0 if energies is None else taken.count - is_seen, taken.count):
            is_last = place + 1 == taken.count
            self._loop.batch_progress.is_last_batch = is_last and source.is_done
            if not (is_last and is_seen):
                singles.make_hidden(self._sent(taken.batch(place)), index + place)
            else:
                made = None if energies is None else Made(energies[1], sizes[-1], gradients)
                singles.make_seen(self._sent(taken.batch(place)), index + place, made)
        return is_seen

    def _factors(self, index: int, count: int) -> list[float | None]:
        """Return the factors of some batches from a place in the epoch on, where a step begins; see `DataWeights`."""
        chains = self._module.chains
        assert chains.weights is not None
        if self._each == 1:  # the same for all
            return [chains.weights.factor(index)] * count
        candidates = chains.accumulation.candidates
        alike = self._each // candidates
        found = [chains.weights.factor(index + place, candidates) for place in range(0, count, alike)]
        return [factor for factor in found for _ in range(alike)][:count]

    # -- steps that wait ----------------------------------------------------------------------------------------------

    def _may_wait(self, count: int) -> bool:
        """Return whether the last steps of an epoch may wait for the next one's."""
        energies = self._module.chains.energies
        return (
            (self._compiled if self._compiles_now else self._listed) is not None
            and energies is not None
            and not energies.is_looking
            and not self._parts
            and self._variate is None
            and not self._singles.checks()
            and self._epochs.only_counts
            and self._waits + count < self._most
            and not self._singles.checks(ahead=1)
        )

    def _last_alike(self, begun: int) -> int:
        """Return the last step that is like the first that waits, the sampler having made so many steps before it."""
        if self._scales is not None or self._with_part or self._with_variate or self._with_choice:
            return 0
        step = self._sampler.step_count
        ahead = min(
            begun + self._coming.steps_alike(begun + 1) - step, self._next_seen.unseen(self._most - self._waits)
        )
        return step + min([callback.free_steps(step + 1, ahead) for callback in self._acting], default=ahead)

    def _are_alike(self, count: int) -> bool:
        """Return whether so many coming steps are like those that wait."""
        return self._sampler.step_count + count <= self._alike_to

    def _controls(self, count: int) -> tuple[list[Controls], int, Any]:
        """Return the controls of some coming steps, see `ComingControls.of_steps`."""
        if not self._are_alike(count):
            return self._coming.of_steps(count)
        before = self._waiting[-1]
        return (
            [Controls(own.lr[-1:] * count, own.temperature[-1:] * count) for own in before.controls],
            count,
            before.form,
        )

    def _goes_on(self, coming: Segment) -> bool:
        """Return whether some steps can be made together with those that wait."""
        before = self._waiting[-1]
        is_alone = not self._parts and self._variate is None
        return is_alone and coming.form == before.form and coming.taken.is_like(before.taken)

    def _take_waiting(self) -> list[Segment]:
        segments, self._waiting, self._waits, self._alike_to = self._waiting, [], 0, 0
        return segments

    def _make_waiting(self) -> None:
        """Make the steps that wait."""
        segments = self._take_waiting()
        if not segments:
            return
        self._coming.apply(self._sampler.step_count)
        energies = self._computed(segments, None, [])
        if energies is None:
            self._make_counted(segments)
        else:
            self._singles.record(energies[1], segments[-1].taken.sizes[-1])

    def _make_counted(self, segments: Sequence[Segment]) -> None:
        """Make steps one after another that a compiled function cannot make, and that are counted already."""
        self._singles.uncount(sum(own.steps for own in segments), [n for own in segments for n in own.taken.sizes])
        for own in segments:
            for place in range(own.taken.count):
                self._coming.apply(self._sampler.step_count + 1)
                self._singles.compute(self._sent(own.taken.batch(place)), own.first + place)

    def _computed(
        self, segments: Sequence[Segment], variate: ControlVariate | None, acting: Sequence[StepPart]
    ) -> Tensor | None:
        """Make some steps by a compiled function, and return the last two's energies; None if it cannot make them."""
        sampler, chains, found = self._sampler, self._module.chains, None
        energies, counted = chains.energies, chains.weights
        is_own = sampler.stand_in is None
        noisy = {is_own and sampler.is_noisy(group) for group in sampler.param_groups}
        assert sampler.flat is not None
        is_possible = len(noisy) == 1 and (noisy == {True} or not acting)
        if energies is None or not is_possible or (is_own and any(map(sampler.sets_options, sampler.param_groups))):
            return None  # in the schedule's controls of these steps, the rule changes itself
        states, plugin = sampler.noise_states(), self._trainer.precision_plugin
        checks = self._singles.take_check()
        first, last = segments[0], segments[-1]
        choice = self._choice if noisy == {True} else None  # otherwise all batches count
        try:
            looks = checks or energies.is_looking
            before = self._plain_energies(energies, first, 0) if looks else None
            if looks and counted is not None:
                counted.factor(first.first)  # which notes what the likelihood counts in this batch
            after = self._plain_energies(energies, last, -1) if checks and last.taken.ends_short else None
            steps = self._at_once(energies)
            controls = [
                Controls(*map(_joined, zip(*own, strict=True)))
                for own in zip(*(s.controls for s in segments), strict=True)
            ]
            noise = steps.noise(len(controls[0].lr)) if noisy == {True} else None
            candidates = 1 if choice is None else choice.candidates
            following = [segment.taken for segment in segments[1:]]
            parts = first.taken.parts(following, candidates, self._data, steps.memory)
            weights = torch.cat([self._weights_of(segment, candidates) for segment in segments])
            batches = Batches(plugin.convert_input(parts), first.taken.structure, first.taken.axis, weights)
            choices = None if choice is None else self._choices(choice, segments)
            with plugin.forward_context():
                found = steps.run(batches, noise, controls, before, after, variate, choices, *acting)
        except (NotTraceableError, IndexError) as error:  # of a label out of range, which single steps explain
            how = "compiled" if self._compiles else "listed"
            self._leave(str(error))
            if chains.traces:
                rank_zero_info(f"The steps are not {how}: {error}.")
            self._compiles = self._lists = False
            self._singles.check_next()
        finally:
            if found is None:
                sampler.noise_states(states)
        if found is not None and self._compiles_now:
            self._counters.compiled_steps += sum(own.steps for own in segments)
        return found

    def _at_once(self, energies: ChainEnergies) -> CompiledSteps | ListedSteps:
        """Return what makes the coming steps."""
        sampler = self._sampler
        if energies.convolutions(self._apart) > MOST_CONVOLUTIONS and not self._with_part:
            self._compiles = False
        if not self._compiles_now:
            self._listed = self._listed or energies.listed_steps(sampler, self._singles.clip, self._apart)
            return self._listed
        if self._compiled is None:
            left = expected_steps(self._trainer, self._module) - self._trainer.global_step
            if self._compiles:
                say_compilation(self._module, left, self._acting, self._captures)
            self._compiled = energies.compiled_steps(
                sampler, self._singles.clip, self._apart, self._most, self._compiles
            )
        return self._compiled

    def _choices(self, choice: GradientChoice, segments: Sequence[Segment]) -> Choices:
        """Return the choices of some steps."""
        assert self._sampler.flat is not None
        of_data = [own.taken.in_candidates(own.taken.sizes, choice.candidates) for own in segments]
        of_batches = [own.taken.in_candidates([1] * own.taken.count, choice.candidates) for own in segments]
        counts, device = torch.cat(of_batches).to(self._sampler.flat.values.dtype), self._module.device
        chances = choice.chances(segments[0].begun, sent(torch.cat(of_data), device))
        return Choices(choice, chances, sent(counts / counts.sum(1, keepdim=True), device))

    def _weights_of(self, segment: Segment, candidates: int) -> Tensor:
        """Return the weights of the data of some steps, shape (K, B) or (K, J, B)."""
        assert self._sampler.flat is not None
        form = tuple(segment.taken.sizes), tuple(segment.factors), candidates
        if form not in self._weights:
            if len(self._weights) >= FEW_FORMS:
                self._weights.clear()
            values = self._sampler.flat.values
            self._weights[form] = sent(segment.taken.weights(segment.factors, values.dtype, candidates), values.device)
        return self._weights[form]

    def _plain_energies(self, energies: ChainEnergies, segment: Segment, step: int) -> Tensor:
        """Return Ũ/N and log p(θ) of a step of a segment, shape (2, C), without a trace."""
        places = segment.taken.batches_of(step)
        batches = [(self._sent(segment.taken.batch(place)), segment.factors[place]) for place in places]
        with self._trainer.precision_plugin.forward_context():
            return torch.stack([energies.plain(batch, factor) for batch, factor in batches]).mean(0)

    def _sent(self, batch: Any) -> Any:
        """Return a batch on the chains' device, in the run's precision."""
        own, on_cpu = self._trainer.precision_plugin.convert_input(batch), self._module.device.type == "cpu"
        return own if on_cpu else self._trainer.strategy.batch_to_device(own, dataloader_idx=0)


def _joined(lists: Sequence[list[Control]]) -> list[Control]:
    """Return lists one after the other."""
    return [*itertools.chain.from_iterable(lists)]
