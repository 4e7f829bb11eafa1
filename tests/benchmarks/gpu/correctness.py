"""Stage `correctness`: chains on the device against the loop on a CPU, twice the same, and over a resume."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightning_sgmcmc import SGHMC, SGLD
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.benchmarks.gpu.setting import RandomImages, Say, Setting, fit, largest_difference, module

CHAINS, STEPS = 3, 4
BLOCKS = 1
"""A small network, since each way to compute it compiles."""
RESUMES: dict[str, dict[str, Any]] = {
    "one lr": {"lr": 0.01},
    "an lr for each chain": {"lr": [0.01, 0.02, 0.03], "compile": False},
}


def run(setting: Setting, case: str, say: Say) -> None:
    """Record how far each way to compute the chains is from the loop on a CPU, as a share of the largest value."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    state = partial(_state, setting)
    compiles = not setting.tiny  # a compiler of C++ takes half a minute
    with TemporaryDirectory() as folder:
        reference = state(accelerator="cpu", chain_execution="loop", compile=False)
        ways: dict[str, dict[str, Any]] = {
            "loop": {"chain_execution": "loop", "compile": False},
            "vmap": {"chain_execution": "vmap", "compile": False},
            "loop, compiled": {"chain_execution": "loop", "compile": compiles},
            "defaults": {},
            "starts of their own, defaults": {"chain_start": "own"},
        }
        own_starts = state(accelerator="cpu", chain_execution="loop", compile=False, chain_start="own")
        for name, options in ways.items():
            right = own_starts if "chain_start" in options else reference
            _try(say, name, lambda o=options, r=right: {"difference": largest_difference(state(**o), r)})  # type: ignore[misc]
        _try(say, "defaults, twice", lambda: {"difference": largest_difference(state(), state())})
        for name, options in RESUMES.items():
            path = str(Path(folder) / f"{len(name)}.ckpt")
            resumed = partial(_resumed, setting, path, sampler=SGHMC, temperature=1.0, **options)
            _try(say, f"resume, {name}", lambda r=resumed: {"difference": largest_difference(*r())})  # type: ignore[misc]


def _try(say: Say, name: str, measured: Any) -> None:
    try:
        say(name, **measured())
    except Exception as error:
        say(name, error=f"{type(error).__name__}: {str(error)[:400]}")


def _data(setting: Setting) -> RandomImages:
    return RandomImages(setting, train=setting.batch * 6, held_out=10, augment=False)


def _chains(setting: Setting, **options: Any) -> Any:
    networks = []
    for chain in range(CHAINS):
        network = setting.network(BLOCKS)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + 0.1 * chain)
        networks.append({f"net.{name}": value for name, value in network.state_dict().items()})
    return module(setting, CHAINS, BLOCKS, **({"sampler": SGLD, "temperature": 0.0, "chain_start": networks} | options))


def _state(setting: Setting, accelerator: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
    chains = _chains(setting, **options)
    where = {"accelerator": accelerator} if accelerator else {}
    fit(setting, chains, _data(setting), STEPS, [SamplingSchedule(every_n_steps=STEPS)], precision="32-true", **where)
    return {name: tensor.cpu().clone() for name, tensor in chains.state_dict().items()}


def _resumed(setting: Setting, path: str, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the states of a run that stopped after three of six steps and resumed, and of one that did not stop."""
    states = []
    for stops in ((3, 6), (6,)):
        for steps in stops:
            chains = _chains(setting, **options)
            resume = path if (steps, len(stops)) == (6, 2) else None
            schedule = SamplingSchedule(every_n_steps=3)
            trainer = fit(setting, chains, _data(setting), steps, [schedule], resume, precision="32-true")
            if steps == 3:
                trainer.save_checkpoint(path)
        states.append({name: tensor.cpu().clone() for name, tensor in chains.state_dict().items()})
    return states[0], states[1]
