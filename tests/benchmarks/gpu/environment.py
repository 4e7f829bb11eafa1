"""Stage `environment`: which device and which versions."""

import datetime
import importlib.metadata
import os
import shutil
import subprocess

import torch

from tests.benchmarks.gpu.checkout import ROOT
from tests.benchmarks.gpu.setting import Say, Setting

PACKAGES = ("torch", "pytorch-lightning", "torchmetrics", "triton", "lightning-sgmcmc")


def run(setting: Setting, case: str, say: Say) -> None:
    """Record device, versions and commit."""
    found: dict[str, object] = {"date": datetime.date.today().isoformat(), "tiny": setting.tiny, "cpus": os.cpu_count()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if setting.tiny:
        found |= {"device": "cpu"}
    else:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    say(case, **found, commit=_commit())


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or None
