"""What 1, 5 and 20 samples and a student cost and lose: size, latency on one thread, and NLL of test data.

    python -m tests.benchmarks.exits [--epochs 60] [--rounds 7] [--only CNN]

Each row is an exit of one posterior of 40 samples: evenly spaced ones in float32, in bfloat16, in bfloat16 as
differences to their mean; those that `compress` chooses on the validation data, beside as many evenly spaced and newest
ones; the whole; and a distilled network. Latency is that of 32 inputs as an ONNX file in onnxruntime, least over rounds
in which all take turns; samples in bfloat16 are computed in float32, so theirs is the same. Then the test data's NLL
(of 1 sample, the mean of the 20's), its difference to the whole's with the standard error over the data, the largest
change of a probability by the rounding, and the largest difference of the ONNX file's probabilities to `predict`'s.
"""

import argparse
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.posterior import Student
from tests.benchmarks.timing import interleaved, timed

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
BATCH = 32


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, outputs))


def convolutional(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, outputs),
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"64-100-10": perceptron, "CNN": convolutional}


def size(folder: Path) -> float:
    """Return the kB of a store's tensors."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e3


def saved_size(posterior: Posterior, folder: Path) -> float:
    """Return the kB of a posterior's tensors on the disk."""
    posterior.save(folder)
    return size(folder)


def session(network: nn.Module, x: Tensor, file: str) -> Any:
    """Return a network as an ONNX file, opened on one thread."""
    rows: Any = {0: torch.export.Dim("batch", min=2)}
    shapes = ((rows,),) if isinstance(network, Student) else (rows,)  # as their forwards name inputs
    torch.onnx.export(network.eval(), (x,), file, input_names=["x"], dynamo=True, dynamic_shapes=shapes, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def against(nll: Tensor, first: Tensor) -> str:
    """Return the mean of paired differences, with its standard error."""
    difference = nll - first
    return f"{float(difference.mean()):+.5f} ± {float(difference.std()) / len(nll) ** 0.5:.5f}"


def rows_of(name: str, epochs: int, rounds: int, folder: Path) -> list[str]:
    """Return the rows of one network."""
    pl.seed_everything(0, verbose=False)
    data, make = DigitsDataModule(), NETWORKS[name]
    module = BayesianModule(make(10), Categorical())
    callbacks = [AutoSampling(num_draws=40), SampleCollector(in_memory=True)]
    pl.Trainer(max_epochs=epochs, callbacks=callbacks, **QUIET).fit(module, datamodule=data)
    whole, test = module.posterior, data.splits[2]
    assert whole is not None
    x, nll, sizes, opened, gaps, rounding, stores = test.inputs, {}, {}, {}, {}, {}, {}

    def losses(probabilities: Tensor) -> Tensor:
        return -probabilities.double().gather(1, test.targets[:, None]).log()[:, 0]

    def add(row: str, network: nn.Module | None, expected: Tensor) -> None:
        nll[row] = losses(expected)
        if network is not None:
            opened[row] = session(network, x[:BATCH], str(folder / f"{name} {row}.onnx"))
            found = opened[row].run(None, {"x": x.numpy()})[0]
            gaps[row] = f"{float(np.abs(found - expected.numpy()).max()):.0e}"

    for count in (20, 5, 1):
        chosen = whole.thin(count=count)
        for word, dtype, base in (
            ("float32", None, None),
            ("bfloat16", "bfloat16", None),
            ("bfloat16 − mean", "bfloat16", "mean"),
        ):
            if count == 1 and base is not None:
                continue  # a sample is its own mean
            row = f"{count} × {word}"
            path = folder / f"{name} {row}"
            saved = chosen.save(path, dtype=dtype, base=base)
            sizes[row] = size(path)
            add(row, None if dtype else saved.ensemble(), found := saved.predict(x).probabilities)
            change = float((found - chosen.predict(x).probabilities).abs().max())
            rounding[row] = f"{change:.0e}" if dtype else ""
            stores.setdefault(word, saved)
            if count == 1:  # the mean single sample, of the first 20
                every = [stores[word][i : i + 1].predict(x).probabilities for i in range(len(stores[word]))]
                nll[row] = torch.stack([losses(own) for own in every]).mean(0)
    for count in (10, 5):
        selections = {
            "chosen": whole.compress(count, data),
            "thinned": whole.thin(count=count),
            "newest": whole[-count:],
        }
        for word, selection in selections.items():
            row = f"{count} {word}"
            sizes[row] = saved_size(selection, folder / f"{name} {row}")
            network = selection.ensemble() if word == "chosen" else None
            add(row, network, selection.predict(x).probabilities)
    sizes["whole"] = saved_size(whole, folder / f"{name} whole")
    add("whole", None, whole.predict(x).probabilities)
    student = whole.distill(make(11), data, epochs=epochs, lr=0.01, accelerator="cpu")
    with torch.no_grad():
        sizes["student"] = 4e-3 * sum(p.numel() for p in student.parameters())
        add("student", student, student.predict(x).probabilities)
    feed = {"x": x[:BATCH].numpy()}
    calls = {row: lambda own=own: timed(lambda: own.run(None, feed), 50) for row, own in opened.items()}
    seconds = interleaved(calls, rounds)  # type: ignore[arg-type]
    times = {row: f"{min(found) * 1e3:.2f}" for row, found in seconds.items()}
    rows = []
    for row, own in nll.items():
        cells = [name, row, f"{sizes[row]:.0f}", times.get(row, ""), f"{float(own.mean()):.4f}"]
        cells += [against(own, nll["whole"]), rounding.get(row, ""), gaps.get(row, "")]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=NETWORKS)
    chosen = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    columns = ("network", "exit", "kB", "ms for 32 inputs", "NLL", "minus the whole's", "rounding", "ONNX − predict")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as folder:
        for name in [chosen.only] if chosen.only else NETWORKS:
            print("\n".join(rows_of(name, chosen.epochs, chosen.rounds, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
