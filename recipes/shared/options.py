"""What the user chooses about a recipe's run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """The options of a recipe.

    Attributes:
        out: the run's folder.
        data_root: folder of the data sets.
        full: the paper's setting instead of a quick one.
        seed: seed of the run; repeats use the seeds after it.
        methods: what the user wrote: each a method's name, or several with commas between them; without any, all run.
        repeats: number of repeats (seeds or splits) instead of the setting's.
        device: "cpu" or "gpu" instead of the recipe's choice ("auto").
        executor: where jobs run: None is processes of this machine, "here" is this process, one after the other, and
            another text is the address of a dask.distributed scheduler.
        changed: settings that replace those of the recipe's YAML file, by name.
        dry_run: only count the jobs (see `run_jobs`).
    """

    out: Path
    data_root: Path
    full: bool = False
    seed: int = 0
    methods: tuple[str, ...] = ()
    repeats: int | None = None
    device: str = "auto"
    executor: str | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def scale(self) -> str:
        """The setting's name in `results.json`."""
        return "full" if self.full else "quick"

    def chosen(self, methods: Iterable[str]) -> list[str]:
        """Return those of a recipe's methods that run, in the recipe's order.

        Args:
            methods: their names.

        Raises:
            ValueError: if `methods` of the options names another one.
        """
        known = list(methods)
        asked = [name for text in self.methods for name in ([text] if text in known else _parts(text))]
        for name in asked:
            if name not in known:
                raise ValueError(f"--methods must be some of {'; '.join(known)}, got {name!r}")
        return [name for name in known if not asked or name in asked]

    def repeated(self, count: int) -> range:
        """Return the indices 0, 1, … of the repeats.

        Args:
            count: number of repeats of the setting.
        """
        return range(count if self.repeats is None else self.repeats)

    def seeds(self, count: int) -> range:
        """Return the seeds of the repeats.

        Args:
            count: number of repeats of the setting.
        """
        return range(self.seed, self.seed + len(self.repeated(count)))

    def accelerator(self, full: str = "auto") -> str:
        """Return the trainer's accelerator: a quick setting runs on the CPU, unless the user chose a device.

        Args:
            full: where a full setting runs.
        """
        return (full if self.full else "cpu") if self.device == "auto" else self.device


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
