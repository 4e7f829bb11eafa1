"""The finished jobs of a recipe, in files of the run's folder: a run that ended early continues with the others."""

import ast
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.recipes.shared.options import Options

FOLDER = "jobs"
LONGEST_NAME = 60


class Finished(NamedTuple):
    """A job that has ended.

    Attributes:
        outcome: what its function returned.
        seconds: processor time of the attempt that ended.
    """

    outcome: Any
    seconds: float


def name_of(job: Sequence[Any]) -> str:
    """Return a job's arguments as text, those with a name by it."""
    return "-".join(str(getattr(part, "name", part)) for part in job)


def program(source: str) -> str:
    """Return Python source in a form without docstrings, comments and layout.

    Args:
        source: of a module.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def _by_value(value: Any) -> Any:
    """Return a value with arrays in place of tensors, whose pickles have other bytes in each process."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _by_value(each) for key, each in value.items()}
    return tuple(map(_by_value, value)) if type(value) in (tuple, list) else value


class JobStore:
    """A file for each finished job, in `jobs` of the run's folder, written at once and read by the next call.

    A job's name includes a hash of its function's source file (of a package: all its files) without docstrings and
    comments, its arguments, the options that matter to it, and the library's version; a changed setting or recipe makes
    other jobs. Outcomes are pickled: run recipes only into folders whose files are your own.

    Args:
        function: the function of the jobs.
        shared: arguments that all jobs have.
        options: the recipe's options.
    """

    def __init__(self, function: Callable[..., Any], shared: Sequence[Any], options: Options) -> None:
        import joblib

        import lightning_sgmcmc

        source = Path(function.__code__.co_filename)
        sources = sorted(source.parent.glob("*.py")) if source.name == "__init__.py" else [source]
        self.folder = options.out / FOLDER
        self._key = joblib.hash(
            (
                [program(path.read_text(encoding="utf-8")) for path in sources if path.exists()],
                function.__qualname__,
                _by_value(tuple(shared)),
                (options.full, options.seed, options.device, dict(options.changed)),
                lightning_sgmcmc.__version__,
            )
        )

    def path(self, job: Sequence[Any]) -> Path:
        """Return the name of a job's folder for checkpoints; its outcome has the same name and ends with `.pickle`.

        Args:
            job: its arguments.
        """
        import joblib

        words = re.sub(r"[^\w.+]+", "-", name_of(job))[:LONGEST_NAME].strip("-")
        return self.folder / f"{words}-{joblib.hash((self._key, _by_value(tuple(job))))[:10]}"

    def read(self, job: Sequence[Any]) -> Finished | None:
        """Return a job's outcome, None if it has not ended or its file cannot be read."""
        try:
            finished = pickle.loads(self._file(job).read_bytes())
        except Exception:  # a damaged pickle can raise anything
            return None
        return Finished(*finished) if isinstance(finished, tuple) and len(finished) == 2 else None

    def write(self, job: Sequence[Any], finished: Finished) -> None:
        """Store a job's outcome.

        Raises:
            OSError: if the file cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(job), pickle.dumps(tuple(finished)))

    def _file(self, job: Sequence[Any]) -> Path:
        place = self.path(job)
        return place.with_name(f"{place.name}.pickle")
