"""The files of a run's results: `results.json`, `table.md`, its history, its evaluations, and where it comes from."""

import contextlib
import functools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.diagnostics.draws import normalised_weights, within_groups
from lightning_sgmcmc.diagnostics.geometry import weight_sketch
from lightning_sgmcmc.diagnostics.scores import expected_scores
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.files import free_name, parse_json, read_regular, without_secrets, write_output
from lightning_sgmcmc.health.report import HEALTH, HealthReport
from lightning_sgmcmc.plain import as_plain, check_known, from_plain
from lightning_sgmcmc.tables import TargetScaling

if TYPE_CHECKING:
    from rich.console import Console


PRIOR_NORM = "‖θ‖²/(d·σ²)"
"""The name of a trace: the square of the parameters in units of their prior's variance, a mean over them."""
NLL = "NLL (nats per example)"
"""The name of a trace: the mini-batch's mean negative log likelihood, without the prior."""
CYCLE = "cycle"
"""The name of a trace: the number of the cycle, from 0."""
SCALARS = ("sampler/lr", "sampler/temperature", "sampler/energy")


@dataclass(frozen=True)
class HistorySample:
    """A sample in `history.json`."""

    IF_SET: ClassVar = ("comparable",)

    step: int
    cycle: int
    chain: int
    energy: float
    log_weight: float
    comparable: bool = True


@dataclass(frozen=True)
class HistoryFile:
    """The contents of `history.json`: one number of each scalar and each trace for each of the steps."""

    steps: list[int] = field(default_factory=list)
    warm_steps: int = 0
    scalars: dict[str, list[float]] = field(default_factory=dict)
    traces: dict[str, list[float]] = field(default_factory=dict)
    samples: list[HistorySample] = field(default_factory=list)


MOST_POINTS = 20_000
"""Logged steps, and samples, that are kept; a longer run is thinned by halving."""
SKETCH_DIMENSION = 1024


class RunHistory:
    """The scalars of the logged steps, the samples, and sketches of their weights."""

    def __init__(self, max_sketches: int = 200) -> None:
        self.trace_names: list[str] = []
        """Names of quantities traced in addition to the scalars, such as single weights."""
        self.warm_steps = 0
        """Steps of the run's warm start."""
        self.planned_cycles: list[tuple[float, float]] = []
        """First and last step of each cycle by the schedule; empty if the logged steps have to tell."""
        self.scalars = ThinnedSeries(MOST_POINTS)
        self.samples = ThinnedSeries(MOST_POINTS)
        self.sketches = ThinnedSeries(max(2, max_sketches))
        self._sketching = max_sketches > 0
        self._first_weight: float | None = None
        self._weights_differ = False
        self._log_sums: dict[int | None, tuple[float, float]] = {}
        """log Σw and log Σw², by chain if weights compare only within chains."""

    def trace(self, names: Sequence[str]) -> None:
        """Set the names of the traced quantities; those that earlier rows have not are NaN there."""
        self.trace_names = list(names)
        length = 1 + len(SCALARS) + len(names)
        self.scalars.rows = [(*row, *[math.nan] * (length - len(row))) for row in self.scalars.rows]

    def add_scalars(self, step: int, values: Sequence[float], traces: Sequence[float] = ()) -> None:
        """Add the scalars of a step, in the order of `SCALARS`, and the traced quantities."""
        self.scalars.append((step, *values, *traces))

    def add_sample(self, sample: Any, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Add a sample, with a sketch of its weights if they are given."""
        self._first_weight = sample.log_weight if self._first_weight is None else self._first_weight
        self._weights_differ |= sample.log_weight != self._first_weight or not sample.comparable
        group = None if sample.comparable else sample.chain
        total, square = self._log_sums.get(group, (-math.inf, -math.inf))
        self._log_sums[group] = (
            float(np.logaddexp(total, sample.log_weight)),
            float(np.logaddexp(square, 2 * sample.log_weight)),
        )
        weight = (sample.log_weight, self.effective_weights, float(sample.comparable))
        self.samples.append((sample.step, sample.cycle, sample.chain, sample.energy, *weight))
        if parameters is None or not self._sketching:
            return
        is_kept = self.sketches.takes_next
        row = weight_sketch(parameters, SKETCH_DIMENSION).tolist() if is_kept else ()
        self.sketches.append((sample.cycle, sample.chain, *row))

    @property
    def takes_sketch(self) -> bool:
        """Whether the weights of the next sample are sketched."""
        return self._sketching and self.sketches.takes_next

    @property
    def has_weights(self) -> bool:
        """Whether the samples' weights differ, or compare within chains only."""
        return self._weights_differ

    @property
    def weight_efficiency(self) -> float:
        """(Σw)²/(S·Σw²) of all samples so far, 0 while all weights are 0."""
        return self.effective_weights / self.samples.seen if self.samples.seen else 0.0

    @property
    def effective_weights(self) -> float:
        """Kish's number (Σw)²/Σw² of all samples so far, 0 while all weights are 0."""
        sizes = [math.exp(2 * total - square) for total, square in self._log_sums.values() if total > -math.inf]
        return len(sizes) ** 2 / sum(1 / size for size in sizes) if sizes else 0.0

    @property
    def weights(self) -> list[float]:
        """The normalised weights of the samples kept; empty while all weights are 0."""
        log_weights = torch.tensor(self.samples.column(4), dtype=torch.float64)
        if not bool((log_weights > -torch.inf).any()):
            return []
        if not all(self.samples.column(6)):
            log_weights = within_groups(log_weights, torch.tensor(self.samples.column(2)))
        return normalised_weights(log_weights).tolist()

    def scalar(self, name: str) -> list[float]:
        """Return the kept values of one of `SCALARS` or of the traced quantities."""
        return self.scalars.column(1 + [*SCALARS, *self.trace_names].index(name))

    @property
    def cycles(self) -> list[tuple[float, float]]:
        """First and last step of each cycle, by the schedule or of the logged ones; empty if they are not known."""
        if self.planned_cycles:
            return self.planned_cycles
        if CYCLE not in self.trace_names:
            return []
        return cycle_spans(self.scalars.column(0), self.scalar(CYCLE))

    def last_temperature(self, otherwise: float) -> float:
        """Return the last temperature above 0, another number if there was none."""
        return next((value for value in reversed(self.scalar("sampler/temperature")) if value > 0), otherwise)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for `history.json`; a number that is not finite is None."""
        content = HistoryFile(
            steps=[int(step) for step in self.scalars.column(0)],
            warm_steps=self.warm_steps,
            scalars={name: self.scalar(name) for name in SCALARS},
            traces={name: self.scalar(name) for name in self.trace_names},
            samples=[
                HistorySample(int(row[0]), int(row[1]), int(row[2]), row[3], row[4], bool(row[6]))
                for row in self.samples.rows
            ],
        )
        return as_plain(content, finite=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, names and tensors."""
        return {
            "trace_names": list(self.trace_names),
            "scalars": self.scalars.state_dict(),
            "samples": self.samples.state_dict(),
            "sketches": self.sketches.state_dict(),
            "log_sums": dict(self._log_sums),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.trace_names = list(state["trace_names"])
        for name in ("scalars", "samples", "sketches"):
            getattr(self, name).load_state_dict(state[name])
        self._log_sums = dict(state["log_sums"])
        self._first_weight = self.samples.rows[0][4] if self.samples.rows else None
        self._weights_differ = any(row[4] != self._first_weight or not row[6] for row in self.samples.rows)


def cycle_spans(steps: Sequence[float], cycles: Sequence[float]) -> list[tuple[float, float]]:
    """Return first and last step of each run of equal cycle numbers; those that are NaN are left out.

    >>> cycle_spans([1, 5, 9, 13], [0, 0, 1, 1])
    [(1, 5), (9, 13)]
    """
    spans: list[tuple[float, float]] = []
    last = math.nan
    for step, cycle in zip(steps, cycles, strict=True):
        if cycle == last:
            spans[-1] = (spans[-1][0], step)
        elif math.isfinite(cycle):
            spans.append((step, step))
        last = cycle
    return spans


class ThinnedSeries:
    """Keeps every stride-th row of numbers: above the limit, every second one is dropped, and the stride doubles."""

    def __init__(self, limit: int) -> None:
        check_count("limit", limit, least=2)
        self.limit = limit
        self.rows: list[tuple[float, ...]] = []
        self.seen = 0
        self.stride = 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def takes_next(self) -> bool:
        """Whether the next row offered will be kept."""
        return self.seen % self.stride == 0

    def append(self, row: Sequence[float]) -> None:
        """Offer a row, of the same length as the others."""
        if self.takes_next:
            if len(self.rows) == self.limit:
                self.rows = self.rows[::2]
                self.stride *= 2
            if self.takes_next:
                self.rows.append(tuple(row))
        self.seen += 1

    def column(self, index: int) -> list[float]:
        """Return one number of every row."""
        return [row[index] for row in self.rows]

    def tensor(self) -> Tensor:
        """Return the rows, shape (rows, numbers), float64."""
        return torch.tensor(self.rows, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and a tensor."""
        return {"rows": self.tensor(), "seen": self.seen, "stride": self.stride}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.rows = [tuple(row) for row in state["rows"].tolist()]
        self.seen, self.stride = state["seen"], state["stride"]


# -- evaluation file ---------------------------------------------------------------------------------------------------

LARGEST = 2**30
"""In bytes."""
COLUMNS = ("nll", "error", "brier", "square_error")


@dataclass
class StoredEvaluation:
    """An evaluation of a run's average on one data set.

    Attributes:
        kind: what the run is: "posterior samples", "deep ensemble", "SWAG", …
        gradient_evaluations, seconds: of the fit, over all chains; 0 if it ran in another process.
        data: identifies the targets in their units; "" if there are none.
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
    metrics: Mapping[str, float | None]
    columns: dict[str, Tensor] = field(default_factory=dict)


def evaluation_file(folder: Path, stage: str) -> Path:
    """Return the path of the file."""
    return folder / f"evaluation-{stage}.safetensors"


def write_evaluation(folder: Path, stored: StoredEvaluation) -> None:
    """Write the file to a run's folder."""
    numbers = vars(stored) | {"columns": None}
    write_output(evaluation_file(folder, stored.stage), save(stored.columns, {"evaluation": json.dumps(numbers)}))


def read_evaluation(path: Path) -> StoredEvaluation:
    """Return the content of a file."""
    try:
        content = read_regular(path, LARGEST)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        length = int.from_bytes(content[:8], "little")
        numbers = parse_json(parse_json(content[8 : 8 + length])["__metadata__"]["evaluation"])
        check_known(StoredEvaluation, numbers)
        stored: StoredEvaluation = from_plain(StoredEvaluation, numbers | {"columns": {}})
        stored.columns = load(content)
        sizes = {tuple(column.shape) for column in stored.columns.values()}
        is_known = "nll" in stored.columns and set(stored.columns) <= set(COLUMNS)
        if not is_known or len(sizes) != 1 or len(sizes.pop()) != 1:
            raise ValueError("it has other columns")
        if stored.stage not in STAGES:
            raise ValueError(f"its stage is {stored.stage[:40]!r}, not {' or '.join(STAGES)}")
        if not len(stored.columns["nll"]):
            raise ValueError("it has no data")
        costs = stored.samples, stored.chains, stored.gradient_evaluations, stored.seconds
        if not all(math.isfinite(number) and number >= 0 for number in costs):
            raise ValueError("its counts and seconds should be finite and not negative")
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{path} is damaged: {error}") from None
    return stored


def per_datum(evaluation: Evaluation, scaling: TargetScaling) -> tuple[dict[str, Tensor], str]:
    """Return the per-datum results of an evaluation's average, and a text that identifies its targets."""
    average, target = evaluation.average, evaluation.target
    assert average is not None
    terms = average.terms
    columns = {"nll": -average.log_density}
    if target is None:
        return _stored(columns), ""
    probabilities, mean = terms.get("probabilities"), terms.get("mean")  # a likelihood of the user's may have others
    if probabilities is not None and probabilities.dim() == 2 and target.numel() == len(probabilities):
        labels = target.reshape(-1).long()
        chosen = probabilities.gather(1, labels[:, None])[:, 0]
        columns["error"] = (probabilities.argmax(1) != labels).float()
        columns["brier"] = probabilities.square().sum(1) - 2 * chosen + 1
    elif probabilities is not None and target.is_floating_point() and target.shape == probabilities.shape:
        columns["nll"], columns["brier"], right = expected_scores(probabilities, target)
        columns["error"] = 1 - right
    elif mean is not None and mean.dim() >= 2 and target.numel() == mean.numel():
        scale = scaling.factor
        errors = mean - target.reshape(mean.shape)
        if isinstance(scale, Tensor):
            logs = torch.where(errors.isnan(), 0.0, scale.log().to(errors))
            columns["nll"] = columns["nll"] + logs.flatten(1).sum(1)
            columns["square_error"] = (errors * scale.to(errors)).square().flatten(1).nanmean(1)
        else:
            columns["nll"] = columns["nll"] + (~errors.isnan()).flatten(1).sum(1) * math.log(scale)
            columns["square_error"] = errors.square().flatten(1).nanmean(1) * scale**2
    values = target.detach().cpu().double().contiguous()
    content = values.numpy().tobytes()
    if any(scaling.mean) or set(scaling.std) != {1.0}:  # equal standardised targets may be of other units
        content += " ".join(f"{number:.6g}" for number in (*scaling.mean, *scaling.std)).encode()
    return _stored(columns), f"{len(values)}-{zlib.crc32(content):08x}"


def _stored(columns: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: column.detach().cpu().float().contiguous() for name, column in columns.items()}


# -- origin ------------------------------------------------------------------------------------------------------------

PACKAGES = ("lightning-sgmcmc", "torch", "pytorch-lightning")
INERT = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|precomposeunicode|symlinks|autocrlf|eol)"
    r"|extensions\.(objectformat|refstorage)|remote\..*\.(url|pushurl|fetch|tagopt)|branch\..*|user\.(name|email)"
    r"|submodule\..*\.(url|active)|submodule\.active|(pull|push|init|color|advice)\..*",
    re.DOTALL,
)
"""Entries of a repository's configuration that make `git status` start no program and read no other folder."""


@functools.cache
def origin_of_run() -> dict[str, Any]:
    """Return date, command, versions, machine and the folder's commit, as they are at the process's first call."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join([program, *without_secrets(sys.argv[1:])]),
        "commit": commit(),
        "versions": versions((*PACKAGES, "numpy")),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit(folder: Path | None = None) -> str | None:
    """Return the git commit of a folder, "… with changes" if files differ from it, and None if it is not known."""
    try:
        name = _git(folder, "rev-parse", "HEAD")
        keys = _git(folder, "config", "--local", "--list", "--name-only", "-z").split("\0")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    try:  # the folder can come from elsewhere, and its `.git/config` can name programs
        if not all(INERT.fullmatch(key) for key in keys if key):
            return f"{name}, changes not looked for"
        # Submodules have configurations of their own.
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return f"{name}, changes not looked for"
    return f"{name} with changes" if changed else name


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of packages, None for one that runs from a copy of its source, and of "python"."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in found:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {"python": platform.python_version()}


def _git(folder: Path | None, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    found = subprocess.run(
        ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=5,
        check=True,
    )
    return found.stdout.strip()


# -- results -----------------------------------------------------------------------------------------------------------


RESULTS, TABLE, SUMMARY = "results.json", "table.md", "summary.txt"
CHOICES = "auto.yaml"
"""The choices of `AutoSampling`: the scales of each chain's prior, and the steps from which they hold."""
OPTIMIZED = "states of an optimization (temperature 0)"
"""What `results.json` calls the samples of a run at temperature 0."""
NETWORKS = "networks ({kind})"
"""What it calls those of a baseline, which its "kind" names."""
STAGES = ("val", "test")
STAGE_NAMES = {"val": "validation data", "test": "test data"}
METHODS = {
    "guessing": "guessing",
    "single": "mean single sample",
    "best_single": "best single sample",
    "first_cycle": "first cycle",
    "bma": "model average",
}
"""What tables call the methods of `results.json`."""
BASELINES = {"sgd": "one network", "ensemble": "ensemble of 4"}
"""What tables call those of `sgmcmc fit --baselines`, by their folders in `baselines` of the run's."""
LARGEST_HEALTH = 2**26


def write_results(folder: Path, results: Mapping[str, Any], table: str) -> None:
    """Write `results.json` and `table.md`."""
    write_output(folder / RESULTS, (json.dumps(results, indent=2) + "\n").encode())
    write_output(folder / TABLE, table.encode())


def read_health(folder: Path) -> HealthReport | None:
    """Return the health report in a run's folder, None if there is none that can be read."""
    try:
        return HealthReport.from_json(parse_json(read_regular(folder / HEALTH, LARGEST_HEALTH).decode()))
    except (OSError, ValueError, AttributeError):
        return None


def is_of_optimization(results: Mapping[str, Any]) -> bool:
    """Return whether an optimization made the samples of `results.json`."""
    return results.get("samples") in (OPTIMIZED, NETWORKS.format(kind=results.get("kind")))


def keep_earlier_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Rename other results in the folder by their stage: `results-val.json`, `table-val.md`, `summary-val.txt`."""
    try:
        earlier = parse_json(read_regular(folder / RESULTS, LARGEST_HEALTH).decode())
    except (OSError, ValueError):
        return  # none, or a damaged file
    if not isinstance(earlier, dict) or (earlier.get("stage"), earlier.get("rows")) == (
        results["stage"],
        json.loads(json.dumps(results["rows"])),
    ):
        return
    stage = earlier.get("stage")
    stage = stage if stage in STAGES else "run"  # it comes from a file, and becomes a part of a file's name
    for name in (RESULTS, TABLE, SUMMARY):
        path = folder / name
        if path.exists():
            path.rename(free_name(path.with_stem(f"{path.stem}-{stage}")))


def plain_console(file: IO[str] | None = None) -> "Console":
    """Return the terminal, or a file of 100 columns, for tables.

    Rich would read names of metrics and folders, such as "top1[/5]", as markup.
    """
    from rich.console import Console

    if file is None:
        return Console(markup=False, emoji=False)
    return Console(markup=False, emoji=False, file=file, width=100, force_jupyter=False)  # which would show it instead


def shown_path(path: Path) -> str:
    """Return a path as text, from the working folder if it lies in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
