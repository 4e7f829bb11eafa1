"""What a trainer is refused for, or warned of, before the first step."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks as lightning_callbacks
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch.utils.data import SequentialSampler

from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.checks import is_of_other_namespace
from lightning_sgmcmc.run.trainer import callbacks_of, is_trial, repeated_batches

SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")

MEDDLING: dict[str, str] = {
    "StochasticWeightAveraging": "averages weights and sets the step size, so the chain samples nothing",
    "WeightAveraging": "evaluates averaged weights, while a posterior averages predictions",
    "EMAWeightAveraging": "evaluates averaged weights, while a posterior averages predictions",
    "BaseFinetuning": "freezes and unfreezes parameters in mid-run, so the chain's space changes under it",
    "ModelPruning": "sets weights to zero in mid-run, so the chain samples nothing",
}


def check_run(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse a trainer's settings with which the chain would not sample its posterior, and warn of biased ones.

    Raises:
        TypeError: for parts that are of `lightning.pytorch`, which is another library to Python.
        ValueError: for a strategy, a callback or an option with which samples would be wrong.
    """
    _check_namespace(trainer)
    _check_strategy(trainer.strategy)
    _check_callbacks(trainer)
    _check_chains(trainer, module)
    if repeated_batches(trainer) > 0:
        raise ValueError(
            f"overfit_batches={repeated_batches(trainer):g} repeats a few batches, while N counts all training data: "
            "give the trainer a smaller data set, or fast_dev_run"
        )
    if trainer.gradient_clip_val:
        rank_zero_warn(
            f"gradient_clip_val={trainer.gradient_clip_val} bounds the drift of the chain: where it acts, the samples "
            "are biased."
        )


def _check_namespace(trainer: pl.Trainer) -> None:
    parts: list[Any] = [*callbacks_of(trainer), *trainer.loggers, getattr(trainer, "datamodule", None)]
    for part in parts:
        if is_of_other_namespace(part):
            name = type(part).__name__
            raise TypeError(
                f"{name} is of lightning.pytorch, and this run is of pytorch_lightning: the two do not mix, so import "
                f"{name} (or what it derives from) from pytorch_lightning"
            )


def _check_strategy(strategy: Any) -> None:
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if names & set(SHARDING):
        raise ValueError(
            f"{type(strategy).__name__} shards the parameters, and the noise and the prior are of whole parameters: "
            "use strategy='ddp' or one device"
        )


def _check_chains(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    layout = layout_of(trainer, chains_of(module).num_chains)
    if layout.is_spread and getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            "a loss scaler leaves out steps of one process's chains, and then the chains' schedules part: use "
            "precision='bf16-mixed' for chains on several processes"
        )
    if len(_values(getattr(module, "lr", None))) > 1 and any(
        isinstance(c, lightning_callbacks.LearningRateMonitor) for c in callbacks_of(trainer)
    ):
        raise ValueError("LearningRateMonitor logs one number, and lr has one for each chain: remove it")


def _values(control: Any) -> tuple[Any, ...]:
    return tuple(control) if isinstance(control, Sequence) else (control,)


def _check_callbacks(trainer: pl.Trainer) -> None:
    for callback in callbacks_of(trainer):
        for name, reason in MEDDLING.items():
            kind = getattr(lightning_callbacks, name, None)
            if kind is not None and isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} {reason}: remove it")


def check_data(trainer: pl.Trainer) -> None:
    """Warn of training data that no batch will ever hold, although N counts them; called when the loaders are known."""
    loader: Any = trainer.train_dataloader
    in_order = isinstance(getattr(loader, "sampler", None), SequentialSampler)
    if in_order and float(trainer.num_training_batches) < len(loader) and not is_trial(trainer):
        rank_zero_warn(
            f"Only the first {trainer.num_training_batches} of {len(loader)} batches are used, in the same order every "
            "epoch, while N counts all training data: shuffle the training loader, or give it fewer data."
        )
