"""The settings of a reference run."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_sgmcmc.checks import check_choice, check_count, check_positive, check_within

Kernel = Literal["nuts", "hmc"]


@dataclass(frozen=True)
class Settings:
    """How chains are made; see `sample`.

    Raises:
        ValueError: for an argument out of range.
    """

    kernel: Kernel = "nuts"
    warmup: int = 1000
    draws: int = 1000
    every_n_draws: int = 1
    target_acceptance: float = 0.8
    max_depth: int = 10
    length: float = math.pi / 2
    jitter: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, ("nuts", "hmc"))
        check_count("warmup", self.warmup, least=0, optional=False)
        for name in ("draws", "every_n_draws", "max_depth"):
            check_count(name, getattr(self, name), optional=False)
        check_within("target_acceptance", self.target_acceptance, "(0, 1)")
        check_positive("length", self.length)
        check_within("jitter", self.jitter, "[0, 1]")
        check_count("seed", self.seed, least=0, optional=False)
        if self.max_depth > 20:
            raise ValueError(f"max_depth must be at most 20, a million gradients, got {self.max_depth}")
        if self.draws < self.every_n_draws:
            raise ValueError(f"draws={self.draws} leaves no draw with every_n_draws={self.every_n_draws}: raise draws")

    @property
    def iterations(self) -> int:
        """Iterations of the warm-up and the draws."""
        return self.warmup + self.draws

    def law(self) -> dict[str, Any]:
        """Return the settings on which each draw depends, as plain data; a run may be continued to more draws."""
        return {name: value for name, value in asdict(self).items() if name != "draws"}
