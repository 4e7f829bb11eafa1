"""Under every setting of Lightning's trainer a run at temperature 0 is the run of torch's SGD, bit for bit.

uv run pytest tests/conduct -m "slow or not slow"
"""

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from tests.conduct.modules import N, both
from tests.conduct.settings import EQUAL, REFUSED, REWEIGHED, Setting


def parameters_of(module: Any) -> dict[str, Tensor]:
    net: nn.Module = module.net
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def ending(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """Return what a run leaves: parameters, counts, logged metrics, and the hooks that it has called."""
    metrics = {name.replace("SGLD", "SGD"): float(value) for name, value in trainer.callback_metrics.items()}
    bar = trainer.progress_bar_metrics if trainer.progress_bar_callback else {}
    return {
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": metrics,
        "bar": {name: value for name, value in bar.items() if name != "v_num"},
        "calls": getattr(module, "calls", []),
    }


def runs(setting: Setting, folder: Path, chains: int = 1) -> list[tuple[pl.Trainer, Any]]:
    """Return trainers and modules of the plain run and of ours."""
    ends = []
    for kind, num_data in zip(
        both(*setting.mixins, chains=chains, **setting.attributes),
        (setting.num_data or N, setting.num_data),
        strict=True,
    ):
        place = folder / str(len(ends))
        place.mkdir()
        pl.seed_everything(7, verbose=False)

        def make(kind: Any = kind, num_data: int | None = num_data) -> Any:
            return kind(num_data)

        ends.append(setting.fitted(make(), make, place))
    return ends


def quick(settings: dict[str, Setting]) -> list[Any]:
    """Return the settings' names; those that are not quick are marked as slow."""
    return [name if s.is_quick else pytest.param(name, marks=pytest.mark.slow) for name, s in settings.items()]


@pytest.mark.parametrize("name", quick(EQUAL))
def test_one_chain_is_sgd(name: str, tmp_path: Path) -> None:
    (plain_trainer, plain), (trainer, ours) = runs(EQUAL[name], tmp_path)
    wanted, found = ending(plain_trainer, plain), ending(trainer, ours)
    for part, value in wanted.items():
        assert (
            found[part] == pytest.approx(value, nan_ok=True, rel=0, abs=0)
            if part == "metrics"
            else found[part] == value
        ), part
    for parameter, value in parameters_of(plain).items():
        assert torch.equal(parameters_of(ours)[parameter], value), parameter


@pytest.mark.parametrize("name", quick(EQUAL))
def test_each_of_two_chains_is_sgd(name: str, tmp_path: Path) -> None:
    (plain_trainer, plain), (trainer, ours) = runs(EQUAL[name], tmp_path, chains=2)
    assert (trainer.global_step, trainer.current_epoch) == (plain_trainer.global_step, plain_trainer.current_epoch)
    if trainer.global_step == 0:
        return
    for parameter, value in parameters_of(plain).items():
        for chain in parameters_of(ours)[parameter]:
            torch.testing.assert_close(chain, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REWEIGHED)
def test_short_steps_make_the_same_number_of_steps(name: str, tmp_path: Path) -> None:
    (plain_trainer, _), (trainer, ours) = runs(REWEIGHED[name], tmp_path)
    assert (trainer.global_step, trainer.current_epoch) == (plain_trainer.global_step, plain_trainer.current_epoch)
    assert all(math.isfinite(float(p.sum())) for p in parameters_of(ours).values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_samples_nothing_is_refused_at_once(name: str, tmp_path: Path) -> None:
    _, kind = both()
    module = kind()
    with pytest.raises((ValueError, TypeError)) as raised:
        REFUSED[name].fitted(module, kind, tmp_path)
    assert "training_step" not in str(raised.traceback)
    assert not getattr(module, "calls", [])
