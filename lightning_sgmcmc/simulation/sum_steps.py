"""The steps of all chains of a light loop on a sum, one by one or in compiled blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sgmcmc.simulation.gradient_runs import Gradients, SumRun
from lightning_sgmcmc.simulation.steps import BLOCK, compiled_block, is_worth_compiling


class SumSteps:
    """Steps all chains.

    Args:
        run: the parts of the run.
        gradients: its gradients.
    """

    def __init__(self, run: SumRun, gradients: Gradients) -> None:
        self.run = run
        self.gradients = gradients
        self.count = 0
        self.spent = 0
        self._noise = run.generator("noise")
        self._draws = run.rule.draws if run.group["temperature"] > 0 else 0

    @property
    def place(self) -> Tensor:
        """The chains' present positions, shape (C, d)."""
        return self.run.place.detach()

    def step(self) -> None:
        """Make one step."""
        self.spent += self.gradients.cost
        self._advance()
        self.count += 1

    def _advance(self) -> None:
        run = self.run
        gradient = self.gradients.take()
        noise = [torch.empty_like(gradient).normal_(generator=self._noise) for _ in range(self._draws)]
        run.rule.update(run.group, [run.place], [gradient], noise or None)


class BlockSteps(SumSteps):
    """Steps all chains in compiled blocks; `place` follows within a block, whose end the parameter has reached.

    The random numbers of a step are those of `SumSteps`.
    """

    def __init__(self, run: SumRun, gradients: Gradients) -> None:
        super().__init__(run, gradients)
        self._block: Callable[..., Tensor] | None = None
        self._places = run.place.detach()[None]
        self._next = 1
        self._normals = run.place.new_empty(BLOCK, self._draws, *run.place.shape)

    @property
    def place(self) -> Tensor:
        return self._places[self._next - 1]

    def _advance(self) -> None:
        if self._block is None:  # the first step creates the rule's buffers
            super()._advance()
            self._block = self._compiled()
        elif self._next < len(self._places):
            self._next += 1
        else:
            for row in self._normals.flatten(0, 1):
                row.normal_(generator=self._noise)
            self._places, self._next = self._block(self.gradients.draw(BLOCK), self._normals), 1

    def run_block(self, drawn: Tensor, normals: Tensor) -> Tensor:
        """Make a block's steps; return the positions after each, shape (K, C, d).

        Args:
            drawn: random numbers of the gradients, shape (K, …).
            normals: standard normal numbers, shape (K, J, C, d).
        """
        run, places = self.run, []
        for k in range(len(drawn)):
            gradient = self.gradients.at(run.place, drawn[k])
            noise = [normals[k, j].clone() for j in range(self._draws)]
            run.rule.update(run.group, [run.place], [gradient], noise or None)
            places.append(run.place.clone())
        return torch.stack(places)

    def _compiled(self) -> Callable[..., Tensor]:
        return compiled_block(self.run_block, self.run.place.device)


def steps_of(run: SumRun, gradients: Gradients, planned: int, compile: bool | None) -> SumSteps:
    """Return the steps of a run, in compiled blocks if wanted.

    Args:
        run: the parts of the run.
        gradients: its gradients.
        planned: steps of the run.
        compile: whether to compile; None compiles long runs where that is possible.

    Raises:
        ValueError: for compile=True with gradients that depend on earlier steps.
    """
    if compile and not gradients.is_memoryless:
        raise ValueError(
            "compile=True needs FullGradient or UniformGradient, whose gradients depend on the present place alone: "
            "pass compile=None"
        )
    if compile is None:
        compile = gradients.is_memoryless and is_worth_compiling(planned, run.place.device)
    return BlockSteps(run, gradients) if compile else SumSteps(run, gradients)
