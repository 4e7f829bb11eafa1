"""What a recipe needs, checked before its first step."""

import pytorch_lightning as pl


def require(*sources: pl.LightningDataModule) -> None:
    """Read data sets, so that a missing one ends the recipe at once and not after minutes of work.

    Raises:
        FileNotFoundError: if data are missing.
    """
    for source in sources:
        source.prepare_data()
        source.setup("fit")
