"""What the torch workers share: the classification problem, the reference, a timed fit, an optimizer's chain."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from regression import Regression
from torch import Tensor, nn

torch.set_num_threads(1)

NUM_DATA, FEATURES, CLASSES, BATCH, LEARNING_RATE = 60_000, 784, 10, 100, 0.01
WARM_UP = 60
"""Steps before the clock starts; torch-uncertainty's SGHMC ends its burn-in within them."""


def synthetic_mnist() -> tuple[Tensor, Tensor]:
    """Return noise in the shape of MNIST: inputs (60000, 784) and labels (60000,)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(NUM_DATA, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (NUM_DATA,), generator=generator)


INPUTS, LABELS = synthetic_mnist()


def mlp() -> nn.Sequential:
    """Return the network 784-100-10, 79,510 parameters."""
    return nn.Sequential(nn.Linear(FEATURES, 100), nn.ReLU(), nn.Linear(100, CLASSES))


class Batches:
    """So many whole batches by `randperm` and indexing: what a loader costs at least."""

    def __init__(
        self, count: int, wrap: Callable[[Tensor, Tensor], Any] = lambda inputs, labels: (inputs, labels)
    ) -> None:
        self.count = count
        self.wrap = wrap

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        per_epoch = NUM_DATA // BATCH
        for step in range(self.count):
            if step % per_epoch == 0:
                order = torch.randperm(NUM_DATA)
            position = step % per_epoch * BATCH
            index = order[position : position + BATCH]
            yield self.wrap(INPUTS[index], LABELS[index])


def seconds_per_step(step: Callable[[Tensor, Tensor], object], steps: int) -> float:
    """Return the mean seconds of a step over so many batches, after a warm-up."""
    start = 0.0
    for number, (inputs, labels) in enumerate(Batches(WARM_UP + steps)):
        if number == WARM_UP:
            start = time.perf_counter()
        step(inputs, labels)
    return (time.perf_counter() - start) / steps


def sgd_step(after: Callable[[], object] = lambda: None) -> Callable[[Tensor, Tensor], None]:
    """Return a step of the bare torch SGD loop, followed by `after`."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        after()

    return step


def time_sgd(steps: int) -> float:
    """Return the seconds a step of the bare torch SGD loop: the reference."""
    return seconds_per_step(sgd_step(), steps)


def time_noisy_sgd(steps: int) -> float:
    """Return the same with one `normal_` of the parameters' size: the floor of every Langevin method in torch."""
    noise = torch.empty(sum(p.numel() for p in mlp().parameters()))
    return seconds_per_step(sgd_step(noise.normal_), steps)


def time_fit(
    lightning: Any,
    module: Any,
    batches: Iterable[Any],
    steps: int,
    warm_up: int = WARM_UP,
    callbacks: Iterable[Any] = (),
    folder: str | None = None,
    **fit_options: Any,
) -> float:
    """Return the seconds a step of `Trainer.fit` without logger, bar, summary and checkpoints, all hooks included.

    Args:
        lightning: `pytorch_lightning` or `lightning.pytorch`, whichever the module is of.
        module: the LightningModule.
        batches: the training loader, of `warm_up + steps` batches at least.
        steps: the steps to time.
        warm_up: the steps before them.
        callbacks: the method's own callbacks.
        folder: the trainer's folder; None is one that is removed afterwards.
        fit_options: further arguments of `fit`.
    """

    class Stopwatch(lightning.Callback):  # type: ignore[misc,name-defined]
        start = stop = 0.0

        def on_train_batch_start(self, trainer: Any, *unused: Any) -> None:
            self.count = getattr(self, "count", 0) + 1
            if self.count == warm_up + 1:
                self.start = time.perf_counter()

        def on_train_epoch_end(self, *unused: Any) -> None:
            self.stop = time.perf_counter()

    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as own_folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=warm_up + steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder or own_folder,
            callbacks=[watch, *callbacks],
        )
        trainer.fit(module, batches, **fit_options)
    if watch.count != warm_up + steps:
        raise RuntimeError(f"the fit took {watch.count} steps in place of {warm_up + steps}")
    return (watch.stop - watch.start) / steps


def regression_batches(problem: Regression, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a regression."""
    inputs, targets = torch.from_numpy(problem.inputs), torch.from_numpy(problem.targets)
    for index in problem.batches(steps):
        index = torch.from_numpy(index)
        yield inputs[index], targets[index]


def optimizer_chain(
    problem: Regression, steps: int, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> NDArray[np.float32]:
    """Return the path (steps, d) of an optimizer that samples, on the mean loss of a regression."""
    torch.manual_seed(problem.seed)
    weights = nn.Parameter(torch.zeros(problem.dimension))
    optimizer = make_optimizer([weights])
    path = torch.empty(steps, problem.dimension)
    for step, (inputs, targets) in enumerate(regression_batches(problem, steps)):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = (inputs @ weights - targets).square().mean() / 2
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        path[step] = weights.detach()
    return path.numpy()
