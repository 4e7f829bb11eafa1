"""TensorBoard's pages: `uv run --with tensorboard python -m tests.benchmarks.tensorboard_picture --out PNG`.

Fits a small network to Digits with `TensorBoardLogger` and `PosteriorDashboard`, starts TensorBoard on the log, and
writes its pages of scalars and images, as chromium draws them, below one another into one PNG.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    CyclicalSchedule,
    PosteriorDashboard,
    SampleCollector,
)
from lightning_sgmcmc.datamodules import DigitsDataModule
from tests.support.trainers import quiet_trainer

WIDTH, HEIGHT, COLOURS = 1200, 800, 64
PAGES = {"scalars": "scalars&tagFilter=posterior|health/k|health/c&_smoothingWeight=0", "images": "images"}


def fit(folder: Path) -> None:
    """Fit with a log in a folder."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.1, seed=0)
    callbacks: list[pl.Callback] = [CyclicalSchedule(num_cycles=4, samples_per_cycle=3), SampleCollector()]
    callbacks += [BayesianModelAverage(), ChainHealth(warn=False)]
    callbacks += [PosteriorDashboard(figures=["schedule", "energy", "running", "reliability"])]
    logger = TensorBoardLogger(str(folder), name="digits")
    trainer = quiet_trainer(max_epochs=60, callbacks=callbacks, logger=logger, default_root_dir=folder)
    trainer.fit(module, datamodule=DigitsDataModule())


def screenshot(address: str, path: Path) -> None:
    """Write a page as chromium draws it once its requests have ended."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=60000"]
    command = [browser, *options, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={path}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--port", type=int, default=6016)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fit(folder / "runs")
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", str(options.port)]
        server = subprocess.Popen(command, cwd=folder)
        try:
            time.sleep(30)  # until it has read the log
            shots = [folder / f"{page}.png" for page in PAGES]
            for address, shot in zip(PAGES.values(), shots, strict=True):
                screenshot(f"http://localhost:{options.port}/?darkMode=false#{address}", shot)
        finally:
            server.terminate()
            server.wait()
        images = [Image.open(shot).convert("RGB") for shot in shots]
        whole = Image.new("RGB", (WIDTH, HEIGHT * len(images)))
        for place, image in enumerate(images):
            whole.paste(image, (0, place * HEIGHT))
        whole.quantize(COLOURS).save(options.out, optimize=True)


if __name__ == "__main__":
    main()
