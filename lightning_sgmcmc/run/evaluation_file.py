"""The file of an evaluation's per-datum results, by which runs on the same data are compared."""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.files import parse_json, read_regular, write_output
from lightning_sgmcmc.run.results import STAGES
from lightning_sgmcmc.tables import TargetScaling

LARGEST = 2**30
"""In bytes."""
COLUMNS = ("nll", "error", "brier", "square_error")


@dataclass
class StoredEvaluation:
    """An evaluation of a run's average on one data set.

    Attributes:
        stage: "val" or "test".
        kind: what the run is: "posterior samples", "deep ensemble", "SWAG", …
        samples, chains: their numbers.
        gradient_evaluations: per-datum gradients of the fit, over all chains; 0 if it ran in another process.
        seconds: of the fit; 0 likewise.
        data: identifies the targets; "" if there are none.
        metrics: of the average of all samples.
        columns: per-datum results, shape (n,): `nll` in nats, and `error` (0 or 1) and `brier` of classes, or
            `square_error` of a regression, in original units.
    """

    stage: str
    kind: str
    samples: int
    chains: int
    gradient_evaluations: int
    seconds: float
    data: str
    metrics: dict[str, float]
    columns: dict[str, Tensor] = field(default_factory=dict)


def evaluation_file(folder: Path, stage: str) -> Path:
    """Return the path of the file."""
    return folder / f"evaluation-{stage}.safetensors"


def write_evaluation(folder: Path, stored: StoredEvaluation) -> None:
    """Write the file to a run's folder."""
    numbers = asdict(stored) | {"columns": None}
    write_output(evaluation_file(folder, stored.stage), save(stored.columns, {"evaluation": json.dumps(numbers)}))


def read_evaluation(path: Path) -> StoredEvaluation:
    """Return the content of a file.

    Raises:
        FileNotFoundError: if it is missing.
        ValueError: if it is damaged, or a link.
    """
    try:
        content = read_regular(path, LARGEST)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        length = int.from_bytes(content[:8], "little")
        numbers = parse_json(parse_json(content[8 : 8 + length])["__metadata__"]["evaluation"])
        columns = load(content)
        stored = StoredEvaluation(**numbers | {"columns": columns})
        sizes = {tuple(column.shape) for column in columns.values()}
        sound = "nll" in columns and set(columns) <= set(COLUMNS) and len(sizes) == 1 and len(sizes.pop()) == 1
        kinds: dict[str, Any] = {"stage": str, "kind": str, "samples": int, "chains": int, "gradient_evaluations": int}
        kinds |= {"seconds": int | float, "data": str, "metrics": dict}
        if not sound or not all(isinstance(getattr(stored, name), kind) for name, kind in kinds.items()):
            raise ValueError("it has other entries")
        if stored.stage not in STAGES:
            raise ValueError(f"its stage is {stored.stage[:40]!r}, not {' or '.join(STAGES)}")
        numbered = all(value is None or isinstance(value, int | float) for value in stored.metrics.values())
        if not numbered or not all(isinstance(name, str) for name in stored.metrics):
            raise ValueError("its metrics should be numbers by name")
        if not len(columns["nll"]):
            raise ValueError("it has no data")
        if not all(map(_is_cost, (stored.samples, stored.chains, stored.gradient_evaluations, stored.seconds))):
            raise ValueError("its counts and seconds should be finite and not negative")
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{path} is damaged: {error}") from None
    return stored


def _is_cost(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def per_datum(evaluation: Evaluation, scaling: TargetScaling) -> tuple[dict[str, Tensor], str]:
    """Return the per-datum results of an evaluation's average, and a text that identifies its targets.

    Args:
        evaluation: with samples.
        scaling: of the targets.
    """
    average, target = evaluation.average, evaluation.target
    assert average is not None
    terms = average.terms
    columns = {"nll": -average.log_density}
    if target is None:
        return _stored(columns), ""
    probabilities, mean = terms.get("probabilities"), terms.get("mean")  # a likelihood of the user's may have others
    if probabilities is not None and probabilities.dim() == 2 and target.numel() == len(probabilities):
        columns |= _of_classes(probabilities, target)
    elif mean is not None and mean.dim() == 2 and target.numel() == mean.numel():
        scale = scaling.factor
        errors = mean - target.reshape(mean.shape)
        if isinstance(scale, Tensor):
            columns["nll"] = columns["nll"] + torch.where(errors.isnan(), 0.0, scale.log().to(errors)).sum(1)
            columns["square_error"] = (errors * scale.to(errors)).square().nanmean(1)
        else:
            columns["nll"] = columns["nll"] + (~errors.isnan()).sum(1) * math.log(scale)
            columns["square_error"] = errors.square().nanmean(1) * scale**2
    values = target.detach().cpu().double().contiguous()
    return _stored(columns), f"{len(values)}-{zlib.crc32(values.numpy().tobytes()):08x}"


def _of_classes(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    labels = target.reshape(-1).long()
    chosen = probabilities.gather(1, labels[:, None])[:, 0]
    brier = probabilities.square().sum(1) - 2 * chosen + 1
    return {"error": (probabilities.argmax(1) != labels).float(), "brier": brier}


def _stored(columns: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: column.detach().cpu().float().contiguous() for name, column in columns.items()}
