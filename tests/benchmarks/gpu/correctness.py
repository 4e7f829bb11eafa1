"""Stage `correctness`: chains on the device against the loop on a CPU, twice the same, over a resume, and what only a
device shows: graphs of many shapes, rows from channels-last weights, and a broken compiler."""

from collections.abc import Callable
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


def run(setting: Setting, case: str, say: Say) -> None:
    """Record how far a way to compute the chains is from the loop on a CPU, as a share of the largest value."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        say(case, difference=CASES[case](setting))
    except Exception as error:
        say(case, error=f"{type(error).__name__}: {str(error)[:400]}")


def _of_way(way: dict[str, Any], setting: Setting) -> float:
    """Return how far a way to compute the chains is from the loop on a CPU."""
    starts = {"chain_start": way["chain_start"]} if "chain_start" in way else {}
    right = _state(setting, accelerator="cpu", chain_execution="loop", compile=False, **starts)
    return largest_difference(_state(setting, **way), right)


def _of_two(options: dict[str, Any], setting: Setting) -> float:
    return largest_difference(_state(setting, **options), _state(setting, **options))


def _of_resume(options: dict[str, Any], setting: Setting) -> float:
    with TemporaryDirectory() as folder:
        return largest_difference(
            *_resumed(setting, str(Path(folder) / "3.ckpt"), sampler=SGHMC, temperature=1.0, **options)
        )


def _of_layout(setting: Setting) -> float:
    return largest_difference(_one_chain(setting, memory_format=torch.channels_last), _one_chain(setting))


def _of_texts(setting: Setting) -> float:
    return largest_difference(_texts(setting, Config(), "auto"), _texts(setting, Config(), False))


def _one_chain(setting: Setting, **form: Any) -> dict[str, torch.Tensor]:
    alone = module(setting, 1, BLOCKS, sampler=SGLD, temperature=0.0)
    alone.to(**form)
    fit(setting, alone, _data(setting), STEPS, [SamplingSchedule(every_n_steps=STEPS)], precision="32-true")
    return {name: tensor.cpu().clone() for name, tensor in alone.state_dict().items()}


def _widths(setting: Setting) -> float:
    """Compare compiled steps with plain ones, the last widths by the kernel for any width."""
    device, differences = setting.device, []
    for width in (1000, 1001, 4096, 70_003):
        rows = torch.randn(4, 2, width, device=device)
        group = {"lr": 0.1, "gradient_multiplier": 1.0, "temperature": 1.0}
        right, found = rows.clone(), rows.clone()
        for tensors, step in ((right, fused.sghmc_step), (found, _compiled(setting, fused.sghmc_step))):
            step(*tensors.unbind(0), *fused.coefficients(group, tensors[0], width), 0.1, 0.0)
        differences.append(float((right - found).abs().max()))
    return max(differences)


def _compiled(setting: Setting, function: Any) -> Any:
    return function if setting.tiny else fused.compiled(function)


def _texts(setting: Setting, config: Any, compiled: Any) -> dict[str, torch.Tensor]:
    fitted = fit_texts(config, compiled, accelerator="cpu" if setting.tiny else "gpu", devices=1)
    return {name: tensor.cpu() for name, tensor in fitted.state_dict().items()}


def _without_backward(setting: Setting) -> float:
    """Return how far a fit whose backward pass does not compile is from one that is not compiled."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such gradient")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken)
    compile_ = torch.compile

    def by_backend(function: Any, **options: Any) -> Any:
        return compile_(function, dynamic=options.get("dynamic"), backend=backend)

    right = _texts(setting, Config(), False)
    with mock.patch.object(torch, "compile", by_backend):
        return largest_difference(_texts(setting, Config(), "auto"), right)


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


def _state(
    setting: Setting,
    accelerator: str | None = None,
    deterministic: bool = False,
    precision: str = "32-true",
    **options: Any,
) -> dict[str, torch.Tensor]:
    chains = _chains(setting, **options)
    trainer: dict[str, Any] = {"precision": precision, "deterministic": deterministic}
    where = {"accelerator": accelerator} if accelerator else {}
    fit(setting, chains, _data(setting), STEPS, [SamplingSchedule(every_n_steps=STEPS)], **trainer, **where)
    return {name: tensor.cpu().clone() for name, tensor in chains.state_dict().items()}


def _resumed(
    setting: Setting, path: str, deterministic: bool = False, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the states of a run that stopped after three of six steps and resumed, and of one that did not stop."""
    states = []
    for stops in ((3, 6), (6,)):
        for steps in stops:
            chains = _chains(setting, **options)
            resume = path if (steps, len(stops)) == (6, 2) else None
            schedule = SamplingSchedule(every_n_steps=3)
            how: dict[str, Any] = {"precision": "32-true", "deterministic": deterministic}
            trainer = fit(setting, chains, _data(setting), steps, [schedule], resume, **how)
            if steps == 3:
                trainer.save_checkpoint(path)
        states.append({name: tensor.cpu().clone() for name, tensor in chains.state_dict().items()})
    return states[0], states[1]


CASES: dict[str, Callable[[Setting], float]] = {
    "loop": partial(_of_way, {"chain_execution": "loop", "compile": False}),
    "vmap": partial(_of_way, {"chain_execution": "vmap", "compile": False}),
    "vmap, mixed precision": partial(_of_way, {"chain_execution": "vmap", "compile": False, "precision": "bf16-mixed"}),
    "defaults": partial(_of_way, {}),
    "starts of their own": partial(_of_way, {"chain_start": "own"}),
    "twice": partial(_of_two, {}),
    "twice, deterministic": partial(_of_two, {"deterministic": True}),
    "resume": partial(_of_resume, {}),
    "resume, deterministic": partial(_of_resume, {"deterministic": True}),
    "resume, an lr for each chain": partial(_of_resume, {"lr": [0.01, 0.02, 0.03], "compile": False}),
    "one chain, channels last": _of_layout,
    "fused steps of four widths": _widths,
    "texts of ten lengths": _of_texts,
    "a backward pass that does not compile": _without_backward,
    "loop, compiled": partial(_of_way, {"chain_execution": "loop"}),
}
