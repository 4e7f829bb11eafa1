"""What a recipe needs, checked before its first step."""

import hashlib
from typing import Any

from lightning_sgmcmc.namespace import pl

CHECKSUMS: dict[str, str] = {}
"""Of the data sets that this process's recipe has read, by a name."""


def require(*sources: pl.LightningDataModule) -> None:
    """Read data sets, so that a missing one ends the recipe at once and not after minutes of work.

    Their checksums are kept for the recipe's results.

    Args:
        sources: the datamodules.

    Raises:
        FileNotFoundError: if data are missing.
    """
    for source in sources:
        source.prepare_data()
        source.setup("fit")
        splits = getattr(source, "splits", None)
        if splits is not None:
            name = getattr(source, "table", None)
            CHECKSUMS[f"{type(source).__name__}{f' {name}' if isinstance(name, str) else ''}"] = checksum(splits)


def checksum(splits: Any) -> str:
    """Return the first 16 digits of the SHA-256 of inputs and targets, all parts together.

    Args:
        splits: parts with `inputs` and `targets`.
    """
    digest = hashlib.sha256()
    for part in splits:
        for tensor in (part.inputs, part.targets):
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
