"""What loggers show: `uv run --with tensorboard python -m tests.benchmarks.logger_pictures --out DIR`.

Fits a small network to Digits with `PosteriorDashboard`, `TensorBoardLogger` and an offline `WandbLogger`. Starts
TensorBoard on its log, and writes its pages of scalars and images, as chromium draws them, to tensorboard.png. Reads
W&B's files back, and draws scalars and images to wandb.png.
"""

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger
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
BLOCK = 32_768
SCALARS = ("val/bma_nll", "val/bma_accuracy", "sampler/lr", "health/kinetic_temperature")
PAGES = {"scalars": "scalars&tagFilter=val/bma_(nll|acc)|sampler/(lr|temp)&_smoothingWeight=0", "images": "images"}


def fit(folder: Path) -> None:
    """Fit with a log in a folder."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.1, seed=0)
    callbacks: list[pl.Callback] = [CyclicalSchedule(num_cycles=4, samples_per_cycle=3), SampleCollector()]
    callbacks += [BayesianModelAverage(), ChainHealth(warn=False)]
    callbacks += [PosteriorDashboard(figures=["schedule", "energy", "running", "reliability"])]
    loggers = [TensorBoardLogger(str(folder / "runs"), name="digits"), WandbLogger(save_dir=str(folder), offline=True)]
    trainer = quiet_trainer(max_epochs=60, callbacks=callbacks, logger=loggers, default_root_dir=folder)
    trainer.fit(module, datamodule=DigitsDataModule())
    loggers[1].experiment.finish()  # writes what is still in memory


def screenshot(address: str, path: Path) -> None:
    """Write a page as chromium draws it once its requests have ended."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=60000"]
    command = [browser, *options, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={path}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline W&B file: LevelDB's log format after a header of 7 bytes."""
    data, place, parts = path.read_bytes(), 7, []
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # a block's last bytes hold no header
            place += BLOCK - place % BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each scalar of an offline W&B run, by name."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for data in records(next(folder.glob("offline-run-*/*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = row.get("trainer/global_step", row.get("_step"))
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith("_"):
                found.setdefault(name, []).append((step, float(value)))
    return found


def draw_wandb(folder: Path, path: Path) -> None:
    """Draw four scalars and two images of an offline W&B run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scalars = history(folder)
    figure = pyplot.figure(figsize=(8, 6.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1, 2])
    for axes, name in zip(upper.subplots(1, 4), SCALARS, strict=True):
        axes.plot(*zip(*scalars[name], strict=True), ".-", color="#0072B2", markersize=3)
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=7)
    for axes, name in zip(lower.subplots(1, 2), ("schedule", "reliability"), strict=True):
        image = max(
            folder.glob(f"offline-run-*/files/media/images/posterior/{name}_*.png"), key=lambda p: p.stat().st_mtime
        )
        axes.imshow(pyplot.imread(image))
        axes.set_title(f"posterior/{name}", fontsize=8)
        axes.axis("off")
    figure.savefig(path, dpi=130)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the PNGs")
    parser.add_argument("--port", type=int, default=6016)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fit(folder)
        draw_wandb(folder / "wandb", options.out / "wandb.png")
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
        whole.quantize(COLOURS).save(options.out / "tensorboard.png", optimize=True)


if __name__ == "__main__":
    main()
