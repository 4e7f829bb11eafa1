"""Claims: each part of a step belongs to at most one callback, in a fixed order."""

from collections.abc import Callable
from typing import Any

SUBJECTS = {
    "seed chain": "both seed the random numbers of each chain",
    "snapshot gradients": "both compare the gradient of each batch with one at a snapshot, so one would count the "
    "noise that the other removes",
    "set controls": "both set a step's controls from its energy to cross the same barriers, and the weights would "
    "belong to no single temperature",
    "chain temperatures": "one gives each chain its own temperature, and the other compares all chains with "
    "the temperature of the run",
    "draw momenta": "both draw the momenta with which sampling begins",
    "choose gradient": "both choose the gradient of a step",
    "observe step": "both observe a step before its update",
    "prepare samples": "both set what samples carry",
    "expand samples": "both replace a sample by draws of their own",
    "energy correction": "both correct the same energies",
    "draw scales": "both set the prior's scales",
    "accept scales": "both decide which of the prior's scales are drawn",
}
"""The subjects, in the order of a step, and why two callbacks cannot share one."""

BEFORE_UPDATE = ("set controls", "draw momenta", "choose gradient", "observe step")
"""Subjects called before an update, in this order: momenta depend on the controls, the choice of a gradient on both,
and observers see the step as it will be made. Clipping follows."""


class Claims:
    """Registry of the callbacks that act on the chains; each subject has at most one claimant."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Callable[..., Any] | None]] = {}
        self._called = False

    def claim(self, subject: str, by: object, call: Callable[..., Any] | None = None) -> None:
        """Assign a subject to a callback.

        Args:
            subject: one of `SUBJECTS`.
            by: the callback.
            call: the function for this part of the step; None only reserves the subject.

        Raises:
            ValueError: if another callback has claimed it; the message names both and the reason.
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
        """Return the function for a subject, or None."""
        held = self._held.get(subject)
        return None if held is None else held[1]

    def holder(self, subject: str) -> object | None:
        """Return the callback that has claimed a subject, or None."""
        held = self._held.get(subject)
        return None if held is None else held[0]

    def before_update(self, *args: Any) -> None:
        """Call the claims of `BEFORE_UPDATE` in their order, once until `end_update`.

        The first claimant in the trainer's list of callbacks calls this method, so the order does not depend on that
        list. Callbacks after all claimants see the gradient and the controls of the update.
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
