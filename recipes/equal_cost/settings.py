"""The settings of the recipe."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The settings of `equal_cost.yaml`.

    Attributes:
        seeds: number of repeats.
        chosen_sets: the data sets that run.
        sets: of each data set its source, sizes, network, batch size and epochs.
        main: the methods that run on a set with `main_only`, unless the user chose others.
        methods: of each method its setting for classification and for regression.
        tuned: of each tuned baseline its setting for each source.
    """

    seeds: int
    chosen_sets: tuple[str, ...]
    main: tuple[str, ...]
    sets: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    tuned: dict[str, dict[str, Any]]

    @property
    def work(self) -> float:
        """The gradient evaluations of a method, of all data sets and seeds."""
        sets = [self.sets[name] for name in self.chosen_sets]
        costs = (one["sizes"][0] * one["epochs"] * min(self.seeds, one.get("seeds", self.seeds)) for one in sets)
        return float(sum(costs))
