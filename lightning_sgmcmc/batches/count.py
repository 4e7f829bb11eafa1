"""How many data a run's posterior conditions on."""

import pytorch_lightning as pl
import torch

from lightning_sgmcmc.batches.loader import ResumableLoader


def count_training_data(trainer: pl.Trainer) -> tuple[int | None, str]:
    """Return the number of training data and its source, or None and the reason why it is unknown."""
    datamodule = getattr(trainer, "datamodule", None)
    declared = getattr(datamodule, "num_data", None)
    if declared is not None:
        return int(declared), f"{type(datamodule).__name__}.num_data"
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableLoader):
        return loader.num_data, "the training data set's length"
    if not isinstance(loader, torch.utils.data.DataLoader):
        return None, "the training loader is not a torch DataLoader"
    samplers = torch.utils.data
    known = (samplers.RandomSampler, samplers.SequentialSampler, samplers.DistributedSampler)
    if not hasattr(loader.dataset, "__len__"):
        return None, "the training data set has no length"
    if not isinstance(loader.sampler, known):
        return None, f"the training loader draws by a {type(loader.sampler).__name__}"
    return len(loader.dataset), "the training data set's length"
