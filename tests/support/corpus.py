"""Damaged and hostile run folders: a function of a seed, made from one sound run by random changes.

A change is of bytes (flipped, cut, repeated), of JSON (another value, a missing or an unknown key, in any place), or of
files (a link, a pipe, a device, a folder, nothing).
"""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import Categorical, Contour, ContourRules, EnergyPartition
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.fit.results import StoredEvaluation, write_evaluation
from lightning_sgmcmc.posterior.calibration import FILE as CALIBRATION
from lightning_sgmcmc.posterior.calibration import identify
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST, checksum
from tests.support import small_run
from tests.support.trainers import quiet_trainer

CHECKPOINT = "checkpoints/last.ckpt"
RESULTS = {
    "recipe": "a recipe",
    "seed": 3,
    "seconds": 12.5,
    "stage": "val",
    "rows": [
        {"method": method, "metric": metric, "value": 0.5, "error": 0.1, "paper": 0.4}
        for method in ("single", "bma")
        for metric in ("accuracy", "nll")
    ],
}
HISTORY = {
    "steps": [2, 4, 6],
    "scalars": {name: [3.0, 2.0, 1.0] for name in ("sampler/energy", "sampler/lr", "sampler/temperature")},
    "samples": [{"step": 2, "cycle": 0, "chain": 0, "energy": 3.0, "log_weight": 0.0}],
}
HEALTH = {
    "step": 6,
    "verdict": "warning",
    "findings": [{"kind": "energy", "sentence": "a sentence", "remedy": "a remedy"}],
    "temperature": 1.0,
    "tensors": {"net.0.weight": {"numel": 4, "kinetic": 1.1, "kinetic_interval": [0.9, 1.3], "configurational": 0.8}},
    "gradient_noise_share": {"net.0.weight": 0.1},
    "energy": {"mean": 20.0, "std": 1.0, "expected": [19.0, 21.0]},
}
PAYLOAD = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\nfrom torch.nn import Linear as Net\n"


def module() -> Any:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.1), nn.Linear(3, 2))
    return small_run.module(net=net, likelihood=Categorical(), num_chains=2, seed=0)


def trainer(folder: Path, steps: int) -> pl.Trainer:
    return quiet_trainer(
        max_steps=steps,
        callbacks=[
            SamplingSchedule(every_n_steps=2),
            SampleCollector(folder / "samples", max_samples=20),
            pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=4),
        ],
        enable_checkpointing=True,
    )


def sound_run(folder: Path) -> Path:
    """Write a run's folder with all its parts: a store of six samples, a checkpoint, results, settings, a picture."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trainer(folder, 6).fit(module(), small_run.loader())
    contour = Contour(EnergyPartition(first_edge=10.0, width=5.0, num_bins=4), ContourRules(zeta=0.5))
    DiskStore(folder / "samples").contour = LearnedContour(contour, contour.initial_state())
    for name, content in (("results", RESULTS), ("history", HISTORY), ("health", HEALTH)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text("model: a\n")
    (folder / "hparams.yaml").write_text("lr: 0.1\nnum_chains: 2\n")
    (folder / "auto.yaml").write_text("trainer:\n  callbacks:\n  - class_path: a.B\n")
    (folder / "table.md").write_text("| a |\n")
    (folder / "energy.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40) + b"IEND\xaeB`\x82")
    (folder / "samples" / "payload.py").write_text(PAYLOAD)
    (folder / "samples" / CALIBRATION).write_text(json.dumps(_calibration(folder / "samples")))
    columns = {"nll": torch.ones(6), "error": torch.zeros(6)}
    write_evaluation(folder, StoredEvaluation("val", "posterior samples", 6, 2, 48, 1.5, "6-0", {"nll": 1.0}, columns))
    return folder


def _calibration(store: Path) -> dict[str, Any]:
    samples = identify(DiskStore(store).records)
    return {
        "kind": "temperature",
        "value": 1.5,
        "count": 24,
        "nll_before": 0.7,
        "nll_after": 0.6,
        "samples": samples,
    }


# -- changes ----------------------------------------------------------------------------------------------------------


def bytes_changed(content: bytes, chooser: random.Random) -> bytes:
    """Return the content with one to three random changes."""
    for _ in range(chooser.choice((1, 1, 1, 2, 3))):
        size = max(len(content), 1)
        start = chooser.randrange(size)
        end = min(size, start + chooser.choice((1, 4, 40, size)))
        piece = content[start:end]
        content = chooser.choice(
            (
                lambda c=content, s=start: c[:s] + bytes([chooser.randrange(256)]) + c[s + 1 :],
                lambda c=content, s=start: c[:s],
                lambda c=content, s=start, e=end: c[:s] + c[e:],
                lambda c=content, e=end, p=piece: c[:e] + p + c[e:],
                lambda c=content, s=start, e=end: c[:s] + bytes(e - s) + c[e:],
                lambda c=content, s=start: c[:s] + chooser.randbytes(30) + c[s:],
                lambda c=content, s=start: c[s:] + c[:s],
            )
        )()
    return content


class Raw(str):
    """Text that is written into JSON as it is."""


def odd_values(outside: Path) -> list[Any]:
    linear = {"class": "torch.nn.modules.linear:Linear", "arguments": {"in_features": 10**7, "out_features": 10**9}}
    deep: Any = linear
    for _ in range(200):
        deep = {"class": "torch.nn.modules.container:Sequential", "children": [["0", deep]]}
    endless = {"class": "torch.nn.modules.transformer:Transformer", "arguments": {"num_encoder_layers": 10**9}}
    names = ("samples.payload:Net", "payload:Net", "os:system", "unittest.__main__:Net", "torch.hub:load", "torch.nn:a")
    plain = [None, True, -1, 0, 1, 7.5, 2**31, 2**63, -(2**70), "", "a", "x" * 10**4, [], {}, [1, 2], {"a": None}]
    paths = [
        "../victim",
        str(outside / "victim"),
        "/dev/zero",
        "sample-00000002-chain-000.safetensors/../../victim",
        ".",
    ]
    raw = [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "1" + "0" * 400,
        "1" * 5000,
        "[" * 10**5,
        '{"a":' * 10**4,
        '"\\u0000"',
    ]
    return [
        *plain,
        *paths,
        *map(Raw, raw),
        linear,
        deep,
        endless,
        *({"class": name, "arguments": {}} for name in names),
        *names,
        {"missing": "something"},
        {"class": "torchvision.models.resnet:resnet18", "arguments": {"weights": "DEFAULT"}, "replaced": {}},
        {"dict": []},
        {"class": 3},
    ]


def json_changed(text: str, chooser: random.Random, outside: Path) -> str:
    """Return a JSON document with another value, a missing key or an unknown key in a random place."""
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                places.append((value, key))
                walk(value[key])

    walk(document)
    value = chooser.choice(odd_values(outside))
    if not places or chooser.random() < 0.05:
        return value if isinstance(value, Raw) else json.dumps(value)
    owner, key = chooser.choice(places)
    action = chooser.random()
    if action < 0.15:
        del owner[key]
    elif action < 0.3 and isinstance(owner, dict):
        owner["unknown"] = owner[key]
    elif isinstance(value, Raw):
        owner[key] = "@raw@"
        return json.dumps(document).replace('"@raw@"', value)
    else:
        owner[key] = value
    return json.dumps(document)


def file_replaced(path: Path, chooser: random.Random, outside: Path) -> None:
    """Put something else than a file in a file's place."""
    kinds = ["device", "pipe", "folder", "loop", "nothing", "dangling", "temporary", "sparse"]
    if path.suffix != ".ckpt":  # its path is an argument, and Lightning itself makes such links
        kinds.append("link")
    kind = chooser.choice(kinds)
    if kind == "temporary":  # where the library writes before it renames
        path.with_name(f".{path.name}.tmp").symlink_to(outside / "victim")
        return
    path.unlink()
    if kind == "link":
        path.symlink_to(outside / "victim")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to(outside / "nothing")
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(2**42)


def change_file(path: Path, chooser: random.Random, outside: Path) -> None:
    """Change a file in a random way that suits its kind."""
    action = chooser.random()
    if action < 0.12:
        file_replaced(path, chooser, outside)
    elif path.name == MANIFEST and action < 0.85:
        lines = path.read_text().splitlines()
        index = chooser.choice((0, chooser.randrange(len(lines))))
        lines[index] = json_changed(lines[index], chooser, outside)
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".json" and action < 0.8:
        path.write_text(json_changed(path.read_text(), chooser, outside))
    elif path.suffix == ".ckpt" and action < 0.7:
        leaf_changed(path, chooser, outside)
    elif path.suffix == ".yaml" and action < 0.7:
        path.write_text(f"{path.read_text()}{chooser.choice(('lr', 'a', 'trainer'))}: {chooser.choice(YAML)}\n")
    elif path.suffix == ".safetensors" and action < 0.6:
        header_changed(path, chooser, outside)
    else:
        path.write_bytes(bytes_changed(path.read_bytes(), chooser))


YAML = (
    "!!timestamp x",
    "!!int x",
    "!!binary '@'",
    "!!python/object/apply:os.system ['true']",
    "!!python/name:samples.payload.Net",
    "!samples.payload.Net {}",
    "2001-99-99",
    "1" + "0" * 400,
    "1e999",
    ".nan",
    "*unknown",
    "&a [*a]",
    "&a {<<: *a}",
    "{[1]: 2}",
    "{{}: 2}",
    "[" * 2000,
    "? ",
    "'",
    "\t",
    "\x00",
    "190:20:30",
    "{class_path: samples.payload.Net}",
    "{class_path: os.system, init_args: {command: 'true'}}",
)
"""Values with tags, references and forms that readers stumble over."""


def leaf_changed(path: Path, chooser: random.Random, outside: Path) -> None:
    """Change one value of a checkpoint, in any place."""
    content = torch.load(path, weights_only=True)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(content)
    owner, key = chooser.choice(places)
    if chooser.random() < 0.2:
        del owner[key]
    else:
        # torch.save itself takes no value as deep as the description of nested layers.
        plain = [
            v for v in odd_values(outside) if not isinstance(v, Raw) and not (isinstance(v, dict) and "children" in v)
        ]
        owner[key] = chooser.choice([*plain, torch.zeros(2), torch.zeros(2, 3, 4), math.nan])
    torch.save(content, path)


def header_changed(path: Path, chooser: random.Random, outside: Path) -> None:
    """Change the JSON header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json_changed(content[8 : 8 + length].decode(), chooser, outside).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def with_their_checksums(store: Path) -> None:
    """Write the checksums of the files as they are into a manifest: a changed sample is then read."""
    header, *lines = [json.loads(line) for line in (store / MANIFEST).read_text().splitlines()]
    for line in lines:
        file = store / line["file"]
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**20:
            line["checksum"] = checksum(file.read_bytes())
    (store / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))


TARGETS: dict[str, Callable[[Path], list[Path]]] = {
    "manifest": lambda run: [run / "samples" / MANIFEST],
    "store": lambda run: sorted((run / "samples").glob("*.safetensors")),
    "report": lambda run: [*run.glob("*.json"), *run.glob("*.yaml"), *run.glob("*.png"), run / "samples" / MANIFEST],
    "settings": lambda run: sorted(run.glob("*.yaml")),
    "calibration": lambda run: [run / "samples" / CALIBRATION],
    "evaluation": lambda run: [run / "evaluation-val.safetensors"],
    "checkpoint": lambda run: [run / CHECKPOINT],
    "resume": lambda run: [run / CHECKPOINT],
}


def make_case(sound: Path, folder: Path, kind: str, seed: int) -> Path:
    """Copy a sound run to `folder/run` and change one or two of its files; `folder/outside` is not to be touched."""
    chooser = random.Random(f"{kind} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    outside, run = folder / "outside", folder / "run"
    outside.mkdir(parents=True)
    (outside / "victim").write_text("secret of the victim\n")
    (folder / "run").parent.mkdir(exist_ok=True)
    ignored = [] if kind in ("checkpoint", "resume") else ["checkpoints"]
    shutil.copytree(sound, run, ignore=shutil.ignore_patterns(*ignored))
    shutil.copy(outside / "victim", run / "victim")
    reads_changed = kind == "store" and chooser.random() < 0.5
    targets = sorted(TARGETS[kind](run))
    for path in chooser.sample(targets, min(len(targets), chooser.choice((1, 1, 2)))):
        change_file(path, chooser, outside)
    if reads_changed:
        with_their_checksums(run / "samples")
    return run


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Raise AssertionError if anything outside the run's folder, or what it must not lose, is changed."""

    def picture() -> dict[str, Any]:
        files = [*(folder / "outside").rglob("*"), folder / "run" / "victim"]
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in files}

    before = picture()
    yield
    assert picture() == before
    assert not list(folder.rglob("imported")), "a module of the folder was imported"
