"""Stage `waits`: where the host waits for the device, as torch itself sees it (`torch.cuda.set_sync_debug_mode`)."""

import sys
import traceback
import warnings
from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch

from tests.benchmarks.gpu.checkout import ROOT
from tests.benchmarks.gpu.setting import RandomImages, Say, Setting, every_callback, fit, module

OURS = tuple(f"{ROOT}/{name}/" for name in ("lightning_sgmcmc", "callbacks", "datamodules"))


class Watch(pl.Callback):
    """Counts waits by line of code, for ordinary steps and for the step that draws samples, which is the last one.

    Args:
        setting: the measurement's.
        first: step at which counting begins.
        last: the step that draws samples.
    """

    def __init__(self, setting: Setting, first: int, last: int) -> None:
        self.size, self.first, self.last = setting, first, last
        self.ordinary: Counter[str] = Counter()
        self.drawing: Counter[str] = Counter()
        self._present = self.ordinary

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.first:
            self._set("warn")
        if trainer.global_step == self.last - 1:
            self._present = self.drawing

    def on_train_epoch_end(self, *args: Any) -> None:
        self._set("default")

    def _set(self, mode: str) -> None:
        if not self.size.tiny:
            torch.cuda.set_sync_debug_mode(mode)

    def note(self, message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
        """Take the place of `warnings.showwarning`."""
        if "called a synchronizing" not in str(message):  # not torch's word that it may miss some
            return
        frames = [f for f in traceback.extract_stack(sys._getframe(1)) if f.filename.startswith(OURS)]
        ours = f"{frames[-1].filename.removeprefix(f'{ROOT}/')}:{frames[-1].lineno}" if frames else None
        self._present[ours or f"{filename}:{line}"] += 1


def run(setting: Setting, case: str, say: Say) -> None:
    """Record the waits of ordinary steps, and those of the second step that draws samples, of interacting chains."""
    first, last = (2, 6) if setting.tiny else (66, 96)  # after the batches that are looked at, and the first samples
    watch = Watch(setting, first, last)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = watch.note
        chains = module(setting, int(case))
        fit(setting, chains, RandomImages(setting), last, [*every_callback(folder, interacting=True, samples=2), watch])
    say(
        f"{case}, interacting",
        steps=last - 1 - first,
        ordinary=sum(watch.ordinary.values()),
        drawing=sum(watch.drawing.values()),
        ordinary_lines=dict(watch.ordinary.most_common(20)),
        drawing_lines=dict(watch.drawing.most_common(20)),
    )
