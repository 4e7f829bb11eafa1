"""A checkpoint of chains in several processes is one file, to which each process gives its own chains (gloo)."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_sgmcmc.chains import joined
from lightning_sgmcmc.posterior import manifest
from tests.support.comparisons import assert_equal_trees, assert_same
from tests.support.trainers import fit_in_layout


class OtherIO(TorchCheckpointIO):
    """A plugin of the user's."""


class Traffic(pl.Callback):
    """Writes how many bytes rank 0 has received for a checkpoint, and which samples each rank has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received = 0
        self.written: set[int] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        receive, content = torch.distributed.recv, manifest.sample_content

        def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            self.received += tensor.nbytes
            return receive(tensor, *arguments, **named)

        def noted(sample: Any) -> bytes:
            self.written.add(sample.chain)
            return content(sample)

        torch.distributed.recv, manifest.sample_content = counted, noted  # in this process, which ends with the fit

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        torch.save((self.received, self.written), self.folder / f"traffic{trainer.global_rank}")


@pytest.mark.parametrize("how", ["one machine", "two machines", "another plugin"])
def test_the_file_is_that_of_one_process(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the processes write it together, send their rows, or a plugin of the user's writes it; and each process
    writes the samples of its own chains."""
    options: dict[str, Any] = {"plugins": [OtherIO()]} if how == "another plugin" else {}
    whole, _ = fit_in_layout(tmp_path / "whole", 4, 1, steps=10)
    if how == "two machines":
        monkeypatch.setattr(joined, "_identity", lambda path: os.getpid())
        monkeypatch.setattr(joined, "LARGEST_MESSAGE", 100)
    folder = tmp_path / "ranks"
    samples, _ = fit_in_layout(folder, 2, 2, steps=10, callbacks=[Traffic(tmp_path)], **options)
    assert_same(whole, samples)
    expected, found = (torch.load(tmp_path / name / "step=10.ckpt", weights_only=True) for name in ("whole", "ranks"))
    for part in ("state_dict", "optimizer_states"):
        assert_equal_trees(expected[part], found[part])
    (received, zero), (_, one) = (torch.load(tmp_path / f"traffic{rank}", weights_only=False) for rank in range(2))
    assert (received > 0) == (how != "one machine")
    assert (zero, one) == ({0, 1}, {2, 3})


def test_an_error_of_a_rank_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = joined._write

    def full(*arguments: Any) -> None:
        if torch.distributed.get_rank() == 1 and (tmp_path / "step=10.ckpt").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(*arguments)

    monkeypatch.setattr(joined, "_write", full)
    with pytest.raises(Exception, match=r"step=20.ckpt of .* MB could not be written: No space left on device"):
        fit_in_layout(tmp_path, 1, 2, steps=20)
    assert torch.load(tmp_path / "step=10.ckpt", weights_only=True)["global_step"] == 10
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("tmp") or "step=20" in path.name]


class Halves(pl.Callback):
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: tensor.half() for name, tensor in checkpoint["state_dict"].items()}


def test_a_hook_cannot_replace_what_it_holds_only_a_part_of(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="an on_save_checkpoint hook has replaced 'state_dict"):
        fit_in_layout(tmp_path, 1, 2, steps=10, callbacks=[Halves()])
