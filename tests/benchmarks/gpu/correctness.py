"""Stage `correctness`: chains on the device against the loop on a CPU, twice the same, and over a resume."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd

from lightning_sgmcmc import SGHMC, SGLD
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.samplers import rows as fused
from tests.benchmarks.gpu.setting import RandomImages, Say, Setting, fit, largest_difference, module
from tests.support.texts import Config, fit_texts

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
    _of_devices(setting, say)


def _of_devices(setting: Setting, say: Say) -> None:
    """What only a device shows: real graphs of many shapes, rows from channels-last weights, and a broken compiler."""
    one = partial(_one_chain, setting)
    channels_last = {"memory_format": torch.channels_last}
    _try(say, "one chain, channels last", lambda: {"difference": largest_difference(one(**channels_last), one())})
    _try(say, "fused steps of four widths", lambda: _widths(setting))
    texts = partial(_texts, setting, Config())
    _try(say, "texts of ten lengths", lambda: {"difference": largest_difference(texts("auto"), texts(False))})
    _try(say, "a backward pass that does not compile", lambda: _without_backward(setting))


def _one_chain(setting: Setting, **form: Any) -> dict[str, torch.Tensor]:
    alone = module(setting, 1, BLOCKS, sampler=SGLD, temperature=0.0)
    alone.to(**form)
    fit(setting, alone, _data(setting), STEPS, [SamplingSchedule(every_n_steps=STEPS)], precision="32-true")
    return {name: tensor.cpu().clone() for name, tensor in alone.state_dict().items()}


def _widths(setting: Setting) -> dict[str, Any]:
    """Compare compiled steps with plain ones, the last widths by the kernel for any width."""
    device, differences = setting.device, []
    for width in (1000, 1001, 4096, 70_003):
        rows = torch.randn(4, 2, width, device=device)
        group = {"lr": 0.1, "gradient_multiplier": 1.0, "temperature": 1.0}
        right, found = rows.clone(), rows.clone()
        for tensors, step in ((right, fused.sghmc_step), (found, _compiled(setting, fused.sghmc_step))):
            step(*tensors.unbind(0), *fused.coefficients(group, tensors[0], width), 0.1, 0.0)
        differences.append(float((right - found).abs().max()))
    return {"difference": max(differences)}


def _compiled(setting: Setting, function: Any) -> Any:
    return function if setting.tiny else fused.compiled(function)


def _texts(setting: Setting, config: Any, compiled: Any) -> dict[str, torch.Tensor]:
    fitted = fit_texts(config, compiled, accelerator="cpu" if setting.tiny else "gpu", devices=1)
    return {name: tensor.cpu() for name, tensor in fitted.state_dict().items()}


def _without_backward(setting: Setting) -> dict[str, Any]:
    """Return how far a fit whose backward pass does not compile is from one that is not compiled."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such gradient")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken)
    compile_ = torch.compile

    def by_backend(function: Any, **options: Any) -> Any:
        return compile_(function, dynamic=options.get("dynamic"), backend=backend)

    right = _texts(setting, Config(), False)
    with mock.patch.object(torch, "compile", by_backend):
        return {"difference": largest_difference(_texts(setting, Config(), "auto"), right)}


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
