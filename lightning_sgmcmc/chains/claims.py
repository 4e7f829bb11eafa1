"""Claims: which callback does what in a step, each thing by one callback, in a fixed order."""

from collections.abc import Callable
from typing import Any

SUBJECTS = {
    "seed chain": "both seed the random numbers of a chain's turn",
    "snapshot gradients": "both compare the gradient of each batch with one at a snapshot, so one would count the "
    "noise that the other removes",
    "set controls": "both set the controls of a step from its energy, two ways across the same barriers, and weights "
    "would belong to no single temperature",
    "chain temperatures": "one gives the chains temperatures of their own, and the other compares all chains with the "
    "temperature of the run",
    "choose gradient": "both choose the gradient of a step",
    "observe step": "both observe a step before its update",
    "prepare samples": "both set what samples carry",
}
"""Every subject, in the order of a step, and why two claims on it contradict each other."""

BEFORE_UPDATE = ("set controls", "choose gradient", "observe step")
"""Subjects that are called before an update, in this order: the choice of a gradient depends on the controls, and what
is observed is the step that will be made. Clipping comes after them."""


class Claims:
    """What callbacks do for the chains, by subject; each subject has at most one claimant."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Callable[..., Any] | None]] = {}
        self._called = False

    def claim(self, subject: str, by: object, call: Callable[..., Any] | None = None) -> None:
        """Give a subject to a callback.

        Args:
            subject: one of `SUBJECTS`.
            by: the callback.
            call: what is called when it is the subject's turn; None only reserves the subject.

        Raises:
            ValueError: if another callback has it, naming both and the reason.
            KeyError: for a subject that is not in `SUBJECTS`.
        """
        reason, holder = SUBJECTS[subject], self._held.get(subject, (by, None))[0]
        if holder is not by:
            first, second = type(holder).__name__, type(by).__name__
            raise ValueError(f"{first} and {second} cannot be combined: {reason}; remove one of them")
        self._held[subject] = (by, call)

    def release(self, by: object) -> None:
        """Free all subjects of a callback."""
        self._held = {subject: claim for subject, claim in self._held.items() if claim[0] is not by}

    def clear(self) -> None:
        """Free all subjects, when a fit begins."""
        self._held, self._called = {}, False

    def get(self, subject: str) -> Callable[..., Any] | None:
        """Return what is to be called for a subject, None if there is nothing."""
        held = self._held.get(subject)
        return None if held is None else held[1]

    def has_before_update(self, by: object) -> bool:
        """Return whether a callback has a claim that is called before an update."""
        return any(subject in self._held and self._held[subject][0] is by for subject in BEFORE_UPDATE)

    def before_update(self, *args: Any) -> None:
        """Call, in the order of `BEFORE_UPDATE`, what is claimed to be done before an update; once until `end_update`.

        The first claimant in the trainer's list of callbacks calls it, so the order does not depend on that list, and
        callbacks after all claimants see the gradient and the controls with which the update is made.
        """
        if self._called:
            return
        self._called = True
        for subject in BEFORE_UPDATE:
            held = self._held.get(subject)
            if held is not None and held[1] is not None:
                held[1](*args)

    def end_update(self) -> None:
        """Let the next step call `before_update` again."""
        self._called = False
