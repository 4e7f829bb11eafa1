"""The seed of a run and of each of its fits: randomness belongs to a run, and no two runs share it by accident."""

import hashlib
import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from pytorch_lightning.trainer.states import TrainerFn

from lightning_sgmcmc.seeding import derive_seed, fit_seed


class ProcessRuns:
    """The runs of a process that were given no seed, so that each takes one of its own from `seed_everything`'s.

    The first takes the seed itself. A later one takes a function of it and of the place where torch's default generator
    is when the run begins. So a loop's runs differ, and a run at the place of an earlier one repeats it: after
    `seed_everything` with the same code, as in plain Lightning.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        """By seed, the place of its first run."""
        self._unmoved: dict[tuple[int, str], int] = {}
        """By seed and place, the runs that left the generator where it was."""
        self._counts: dict[int, int] = {}
        """By seed, its runs."""
        self._begun: tuple[int, str] | None = None

    def seed(self, place: str, launched: bool) -> int:
        """Return the seed of the run that begins now; a random one without `seed_everything`.

        Args:
            place: where the generator was when the fit was called, see `present_place`.
            launched: whether a trainer has started this process for the run, so that it knows of no earlier ones.
        """
        given = os.environ.get("PL_GLOBAL_SEED")
        if not given:
            self._begun = None
            return int.from_bytes(os.urandom(4), "little")
        seed = stated_seed(given)
        self._begun = (seed, place)
        if launched:
            return derive_seed(seed, "run", place)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Lightning seeds such processes anew at each fit, so their places are alike: they count.
            earlier = self._counts.get(seed, 0)
            return derive_seed(seed, "run", "number", earlier) if earlier else seed
        earlier = self._unmoved.get(self._begun, 0)
        if not earlier and self._first.get(seed, place) == place:
            return seed
        return derive_seed(seed, "run", place, earlier)

    def count(self) -> None:
        """Count the run that took the last seed, once it has made a step."""
        if self._begun is None:
            return
        (seed, place), begun, self._begun = self._begun, self._begun, None
        self._counts[seed] = self._counts.get(seed, 0) + 1
        self._first.setdefault(seed, place)
        if present_place() == place:
            self._unmoved[begun] = self._unmoved.get(begun, 0) + 1


RUNS = ProcessRuns()
"""This process's."""


def present_place() -> str:
    """Return where torch's default generator is, as a short text."""
    return hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()


class FitSeeds:
    """The seed of a module's run, and of the present one of its fits: each fit draws anew, and continues the chains.

    Args:
        given: the module's argument; None takes `seed_everything`'s (see `ProcessRuns`), or a random one.
    """

    def __init__(self, given: int | None) -> None:
        self.given = given
        self.run = given
        """The run's seed, which the module's first fit takes; None before."""
        self.fits = 0
        """The module's earlier fits, those that made a step."""
        self.loads = 0
        """States that the module has loaded."""
        self.place: str | None = None
        """Where torch's generator was when the fit was called, before Lightning seeds distributed processes."""
        self._has_starts = self._is_known = False
        """Whether chains started by the run's seed, and whether the coming fit's is chosen."""

    @property
    def seed(self) -> int | None:
        """The present fit's; None before the first."""
        return None if self.run is None else fit_seed(self.run, self.fits)

    @property
    def stated(self) -> int | None:
        """The seed that the user has given, to the module or by `seed_everything`; else the run's."""
        text = os.environ.get("PL_GLOBAL_SEED")
        return self.given if self.given is not None else stated_seed(text) if text else self.run

    def begin(self, trainer: pl.Trainer | None, starts: bool) -> None:
        """Choose the coming fit's seed; all ranks do, since they take the first one's.

        Args:
            trainer: the run's; None outside a run.
            starts: whether chains now start by the seed, outside a fit too.
        """
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitting or starts:
            self._choose(trainer)
        self._is_known = fitting
        self._has_starts = self._has_starts or starts

    def ensure(self, trainer: pl.Trainer | None) -> None:
        """Choose the coming fit's seed unless `begin` did."""
        if not self._is_known:
            self._choose(trainer)
        self._is_known = False

    def _choose(self, trainer: pl.Trainer | None) -> None:
        launched = trainer is not None and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)
        if launched:  # the module's earlier fits ended in other processes, from which it has loaded their states
            self.fits = max(self.fits, self.loads)
        if self.given is None and (self.run is None or not (self._has_starts or self.fits)):
            seed = RUNS.seed(self.place or present_place(), launched)
            self.run = int(trainer.strategy.broadcast(seed)) if trainer is not None else seed

    def resume(self, seed: int | None, fits: int) -> None:
        """Let the coming fit be a checkpoint's, or the one after it.

        Args:
            seed: the run's seed in the checkpoint; None keeps the present one.
            fits: number of fits before the coming one.
        """
        self.run, self.fits = self.run if seed is None else seed, fits

    def end_fit(self) -> None:
        """Count a fit that has made a step."""
        self.fits += 1
        RUNS.count()


def stated_seed(text: str) -> int:
    """Return the seed in the environment, which `seed_everything` sets.

    Raises:
        ValueError: if it is no whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable PL_GLOBAL_SEED must be a whole number, got {text[:40]!r}: unset it, or call "
            "seed_everything"
        ) from None
