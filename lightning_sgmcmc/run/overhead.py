"""What Lightning does at every step for nothing, left out during a fit: idle profilers and idle hooks.

A step calls six hooks of every callback, and enters a profiler for each call, whether or not the callback defines the
hook and the user has chosen a profiler. For a small network that takes longer than the network.
"""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call

from lightning_sgmcmc.run.trainer import callbacks_of

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""The hooks of every step."""


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


NOTHING = _Nothing()


class QuietProfiler(PassThroughProfiler):
    """Replaces Lightning's profiler that measures nothing: a step enters that dozens of times, a generator each time.

    The context of every action is one object, which does nothing.
    """

    def profile(self, action_name: str) -> Any:
        return NOTHING


def idle(*arguments: Any, **named: Any) -> None:
    """Stands for an empty hook: whoever else calls it can, and Lightning leaves it out."""


def _is_called(hook: Any) -> bool:
    """Return whether Lightning calls a callback's hook: it asks `callable`, in which this function stands."""
    return hook is not idle and callable(hook)


def leave_out(trainer: Any) -> None:
    """Replace a trainer's profiler if its user has chosen none, and hide the hooks that callbacks do not define.

    Hooks of a class or of an object that differ from Lightning's own empty ones stay.
    """
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = QuietProfiler()
    vars(call)["callable"] = _is_called  # a hook that cannot be called is skipped, before a profiler is entered for it
    for callback in callbacks_of(trainer):
        for hook in HOOKS:
            # Not the object's own hook: a mock makes one when it is asked.
            is_empty = getattr(type(callback), hook, None) is getattr(pl.Callback, hook)
            if is_empty and hook not in vars(callback):
                setattr(callback, hook, idle)


def restore(trainer: Any) -> None:
    """Give a trainer Lightning's own profiler back, and the callbacks their empty hooks."""
    if type(trainer.profiler) is QuietProfiler:
        trainer.profiler = PassThroughProfiler()
    for callback in callbacks_of(trainer):
        for hook in HOOKS:
            if vars(callback).get(hook) is idle:
                delattr(callback, hook)
