"""The same user code on plain Lightning with torch's SGD and on a `BayesianModule` at temperature 0."""

from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, GaussianPrior

N, LR = 24, 0.05
Schedulers = Callable[[Any], Any]


def tensors(rows: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 6, generator=generator)
    return x, x[:, :2].sin() + 0.1 * torch.randn(rows, 2, generator=generator)


def loader(rows: int = N, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors(rows)), batch_size=batch_size, **options)


class Unsized(IterableDataset[Any]):
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*tensors(), strict=True))


class Batches:
    """What Lightning takes besides a DataLoader: any iterable."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class User(pl.LightningModule):
    """What a user writes around a network: logging, hooks that record what they see, schedulers."""

    schedulers: Schedulers | None = None

    def record(self, what: str) -> None:
        self.__dict__.setdefault("calls", []).append(what)

    def pair(self, batch: Any) -> Any:
        return batch

    def scheduled(self, optimizer: Any) -> Any:
        return optimizer if self.schedulers is None else self.schedulers(optimizer)

    def on_train_start(self) -> None:
        self.record(f"train start {self.trainer.max_epochs}")

    def on_train_epoch_start(self) -> None:
        self.record(f"epoch start {self.trainer.current_epoch}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.record(f"batch {self.trainer.current_epoch}/{batch_idx}/{self.trainer.global_step}")
        return None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.record("before zero grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        net: nn.Module = self.net  # type: ignore[assignment]
        squares = [p.grad.double().pow(2).sum() for p in net.parameters() if p.grad is not None]
        self.record(f"before step {float(sum(squares)):.12g}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) and outputs else torch.zeros(())
        self.record(f"end {float(loss):.8g} {self.trainer.global_step}")
        if not self.trainer.barebones:
            self.log("hook/loss", loss, on_step=True, on_epoch=True)
            self.log("steps", float(self.trainer.global_step), prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.record(f"epoch end {self.trainer.current_epoch}")
        if not self.trainer.barebones:
            self.log("epoch_metric", 1.0 / (1 + self.trainer.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.record(f"validation end {self.trainer.global_step}")

    def on_train_end(self) -> None:
        self.record(f"train end {self.trainer.global_step}")


class Plain(User):
    """Lightning's way: a loss, and torch's SGD."""

    def __init__(self, num_data: int = N) -> None:
        super().__init__()
        self.net, self.num_data = network(), num_data
        self.likelihood, self.prior = Gaussian(std=0.7), GaussianPrior(std=1.5)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.pair(batch)
        each = self.likelihood.log_prob(self(x), y)
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return torch.add(each.mean(), self.prior.log_prob(named), alpha=1 / self.num_data).neg()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val/nll", -self.likelihood.log_prob(self(x), y).mean(), batch_size=len(x))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test/nll", -self.likelihood.log_prob(self(x), y).mean(), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        return self.scheduled(torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR))


class Ours(User, BayesianModule):
    """The library's way, at temperature 0."""

    def __init__(self, num_data: int | None = None, chains: int = 1) -> None:
        super().__init__(
            network(),
            Gaussian(std=0.7),
            GaussianPrior(std=1.5),
            SGLD,
            lr=LR,
            temperature=0.0,
            num_data=num_data,
            num_chains=chains,
            chain_start="same",
            shared_batch=True,
        )

    def inputs_and_target(self, batch: Any) -> Any:
        return self.pair(batch)

    def configure_optimizers(self) -> Any:
        return self.scheduled(super().configure_optimizers())


# -- what a user may override -----------------------------------------------------------------------------------------


class SetsStepSize(User):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.record(f"optimizer_step {epoch} {batch_idx}")
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (self.trainer.global_step + 1) / 5)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StepsEverySecond(User):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class Toggles(User):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.toggle_optimizer(self.optimizers())  # type: ignore[arg-type]
        loss = super().training_step(batch, batch_idx)
        self.untoggle_optimizer(self.optimizers())  # type: ignore[arg-type]
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        self.log_dict({"a": loss, "b": 2 * loss}, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "extra": loss.detach() * 2}


class SkipsOne(User):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class CutsEpochs(User):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 3 else None


class Clips(User):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, 0.05 * (1 + self.trainer.current_epoch), "norm")


class Halves(User):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.5, *args, **kwargs)


class ClearsGradients(User):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.record("zero")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class StepsSchedulers(User):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.record(f"scheduler {type(scheduler).__name__}")
        super().lr_scheduler_step(scheduler, metric)


class MovesBatches(User):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 1.5, batch[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] - 0.1, batch[1]


class SetsUp(User):
    def setup(self, stage: str) -> None:
        self.record(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.record(f"teardown {stage}")

    def prepare_data(self) -> None:
        self.record("prepare_data")


class ChangesGradients(User):
    def on_after_backward(self) -> None:
        net: nn.Module = self.net  # type: ignore[assignment]
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class LogsEverywhere(User):
    def on_train_start(self) -> None:
        self.log("start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", 2.0)

    def on_after_backward(self) -> None:
        self.log("after_backward", 3.0, reduce_fx="sum", on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        net: nn.Module = self.net  # type: ignore[assignment]
        self.log("norm", torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm())
        self.log_dict(pl.utilities.grad_norm(net, 2))

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 4.0)


class Reloads(User):
    """The same data in another number of batches each time that the loader is made; N stays."""

    sizes = (4,)
    made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return loader(batch_size=self.sizes[(self.made - 1) % len(self.sizes)])

    def val_dataloader(self) -> Any:
        return loader(8)


class ReloadsMore(Reloads):
    sizes = (6, 4, 3, 2)


class ReloadsFewer(Reloads):
    sizes = (2, 3, 4, 6)


def both(*mixins: type[User], chains: int = 1, **attributes: Any) -> tuple[Any, Any]:
    """Return a plain and a Bayesian class with the same user code."""
    plain: Any = type("PlainRun", (*mixins, Plain), dict(attributes))
    ours: Any = type("OursRun", (*mixins, Ours), dict(attributes))
    return plain, (lambda num_data=None: ours(num_data, chains)) if chains > 1 else ours
