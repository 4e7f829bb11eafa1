"""Checks that samples are finite and fit the model's network."""

from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.chains.masks import MASK_SEED
from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord
from lightning_sgmcmc.chains.stateless import network_state
from lightning_sgmcmc.finite import bad_tensor
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.disk import LEAVE_OUT, DiskStore


def check_sample(sample: PosteriorSample, model: EnergyModel | None) -> None:
    """Raise ValueError unless a sample is finite and, if there is a model, fits its network."""
    if model is not None:
        check_fits(sample, model)
    bad = bad_tensor(sample.parameters, sample.buffers)
    if bad is not None:
        raise ValueError(
            f"the sample of step {sample.step}, chain {sample.chain} has NaN or infinite numbers in '{bad}'; "
            f"{LEAVE_OUT} it"
        )


def sound_records(store: DiskStore, model: EnergyModel | None) -> list[SampleRecord]:
    """Read all samples; return the records of usable ones, with a warning about the others."""
    sound, reasons = [], [f"line {number} of the manifest is damaged" for number in store.damaged_lines]
    for index, record in enumerate(store.records):
        try:
            check_sample(store[index], model)
            sound.append(record)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        total = len(store.records) + len(store.damaged_lines)
        rank_zero_warn(f"{len(reasons)} of {total} samples in {store.path} are skipped, the first since {reasons[0]}")
    return sound


def check_fits(sample: PosteriorSample, model: EnergyModel) -> None:
    """Raise ValueError unless a sample's tensors match the model's in names, shapes and types."""
    found = {name: (tuple(t.shape), _kind(t)) for name, t in sample.state.items() if name != MASK_SEED}
    with model.at_chain(0):
        expected = {name: (tuple(t.shape), _kind(t)) for name, t in network_state(model).items()}
    odd = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
    if not odd:
        return
    theirs, ours = found.get(odd[0], ("none", "none")), expected.get(odd[0], ("none", "none"))
    part, word = (0, "shape") if theirs[0] != ours[0] else (1, "type")
    raise ValueError(
        f"the samples belong to another network than the model: '{odd[0]}' has {word} {theirs[part]} in the samples "
        f"and {ours[part]} in the model ({len(odd)} tensors of the sample of step {sample.step} differ; "
        f"{LEAVE_OUT} single samples)"
    )


def _kind(tensor: Tensor) -> str:
    """Return a tensor's type as text: "float32" for every floating-point type, since it may differ from training."""
    return "float32" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
