"""How many data a run's posterior conditions on, and how its loader draws them."""

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


def draws_with_replacement(trainer: pl.Trainer) -> bool:
    """Return whether the training loader is known to draw its data with replacement."""
    loader = trainer.train_dataloader
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]  # one that makes batches has another
    return any(bool(getattr(sampler, "replacement", False)) for sampler in samplers)


def resolve_num_data(given: int | None, trainer: pl.Trainer, module: str) -> int:
    """Return N: the given one, else the datamodule's or the data set's length; they must not contradict.

    Args:
        given: N as the user has passed it, or None.
        trainer: the run's.
        module: name of the module's class, for messages.

    Raises:
        ValueError: if N is not known, or two sources contradict.
    """
    found, source = count_training_data(trainer)
    if given is None and found is None:
        raise ValueError(f"the number of training data is not known ({source}): pass num_data=… to {module}")
    if given is not None and found is not None and given != found:
        raise ValueError(
            f"num_data={given} contradicts {source}, which says {found}; leave num_data out (to temper the "
            "posterior, set temperature)"
        )
    known = given if given is not None else found
    assert known is not None
    return known
