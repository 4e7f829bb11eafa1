"""Checkpoints in which one entry was changed: a fit from them goes on, or ends with one sentence of this library."""

import copy
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import corpus, small_run
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.filterwarnings("ignore")
OWN = tuple(str(REPOSITORY / folder) for folder in ("lightning_sgmcmc", "callbacks", "datamodules"))
REMOVED = object()
VALUES: list[Any] = [None, "x", -5, 3.5, [], {}, REMOVED, 2**63, "../../x", torch.zeros(2)]
PROGRESS = "loops fit_loop epoch_loop.automatic_optimization.optim_progress optimizer step total"
TABLE: list[tuple[str, Any]] = [
    ("loops", REMOVED),
    ("loops", 3),
    ("state_dict", REMOVED),
    ("state_dict", "x"),
    ("pytorch-lightning_version", REMOVED),
    ("pytorch-lightning_version", 3),
    ("global_step", "x"),
    ("callbacks", []),
    ("optimizer_states", {}),
    ("loops fit_loop", None),
    ("loops fit_loop epoch_progress", None),
    ("loops fit_loop epoch_progress current", "x"),
    ("loops fit_loop state_dict", 3),
    (f"{PROGRESS} completed", REMOVED),
    (f"{PROGRESS} ready", None),
    (PROGRESS, []),
    ("optimizer_states 0 sampler noise generators 0", torch.zeros(2)),
    ("optimizer_states 0 sampler noise", "x"),
    ("optimizer_states 0 sampler", {}),
    ("optimizer_states 0 param_groups 0 lr", REMOVED),
    ("optimizer_states 0 param_groups 0 gradient_multiplier", "x"),
    ("optimizer_states 0 param_groups 0 params", []),
    ("optimizer_states 0 param_groups", 3.5),
    ("callbacks ExactResume", True),
    ("callbacks ExactResume place", 3.5),
    ("callbacks ExactResume place is_over", REMOVED),
    ("callbacks ExactResume fits", "x"),
    ("callbacks Safeguards samples", None),
    ("callbacks Safeguards weights", -1),
    ("callbacks SamplingSchedule warm_steps", "x"),
    ("callbacks SampleCollector seen", -1),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = corpus.sound_run(tmp_path_factory.mktemp("sound") / "run")
    return run, torch.load(run / corpus.CHECKPOINT)


def resume(run: Path, content: dict[str, Any], path: Path) -> None:
    """Fit from a checkpoint with this content; the samples are those of `run`."""
    torch.save(content, path)
    trainer = small_run.quiet_trainer(
        max_steps=6,
        callbacks=[corpus.SamplingSchedule(every_n_steps=2), corpus.SampleCollector(run / "samples", max_samples=20)],
    )
    trainer.fit(corpus.module(), small_run.loader(), ckpt_path=path)


def changed(content: dict[str, Any], place: list[Any], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(content)
    owner: Any = content
    for key in place[:-1]:
        owner = owner[key]
    if value is REMOVED:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    return content


def key_in(owner: Any, name: str) -> Any:
    if isinstance(owner, list):
        return int(name)
    return next((key for key in owner if str(key).partition("{")[0] == name), name)


@pytest.mark.parametrize(("place", "value"), TABLE, ids=[f"{p.split()[-1]}-{i}" for i, (p, _) in enumerate(TABLE)])
def test_a_changed_entry_is_named(place: str, value: Any, sound: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, content = sound
    keys: list[Any] = []
    owner: Any = content
    for name in place.split():
        keys.append(key_in(owner, name))
        owner = owner[keys[-1]]
    with pytest.raises(ValueError, match=r"(?i)damaged|does not fit|not a sampler's") as raised:
        resume(run, changed(content, keys, value), tmp_path / "changed.ckpt")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_entry(seed: int, sound: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """`pytest -n 0 -m slow tests/fit/test_changed_checkpoints.py`: some 280 places, with a random value in each."""
    run, content = sound
    chooser, raw, places = random.Random(seed), [], []

    def walk(value: Any, place: list[Any]) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append([*place, key])
            walk(value[key], [*place, key])

    walk(content, [])
    for place in places:
        value = chooser.choice(VALUES)
        try:
            resume(run, changed(content, place, value), tmp_path / "changed.ckpt")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            if not isinstance(error, ValueError | RuntimeError | OSError) or not where.startswith(OWN):
                raw.append(f"{place} <- {str(value)[:20]}: {error!r} in {where}"[:300])
    assert not raw, f"{len(raw)} of {len(places)}:\n" + "\n".join(raw)
