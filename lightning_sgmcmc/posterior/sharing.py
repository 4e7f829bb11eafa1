"""A posterior handed on: as a folder of its own, in 16 bits if wanted, and on the Hugging Face Hub with a card."""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.files import local_path, parse_json, read_regular
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.posterior.calibration import identify, save_calibration
from lightning_sgmcmc.posterior.description import description_for_store
from lightning_sgmcmc.posterior.disk import DiskStore, whole_store
from lightning_sgmcmc.posterior.export import summary
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.posterior.store import Narrow, SampleStore, StoreView, narrow_dtype
from lightning_sgmcmc.tensors import widest


def save_samples(posterior: Any, path: str | Path, dtype: Any, base: str | None, novelty: bool = True) -> DiskStore:
    """Write the samples of a posterior to a folder, with or without those for novelty; see `Posterior.save`."""
    folder = local_path(path, "path", "save to a local folder, and copy it; or use push_to_hub")
    store: SampleStore = posterior.store
    name = narrow_dtype(dtype)
    if base not in (None, "mean"):
        raise ValueError(f"base={base!r} is not known: pass 'mean', or None for parameters as they are")
    if base is not None and name is None:
        raise ValueError(f"base={base!r} only helps parameters in 16 bits: pass dtype='bfloat16', or leave base out")
    if len(store) == 0:
        raise RuntimeError("the posterior has no samples to save")
    narrow = store.narrow if dtype is None else None
    if name is not None:
        narrow = Narrow(name, {} if base is None else _means(store))
    first = store[0]
    if narrow is not None:
        narrow.narrowed(first)  # refuses before there is a folder
    description = store.model_description
    if description is None and posterior.model is not None:
        description = description_for_store(posterior.model)
    common = description, store.columns, store.shared or first.shared, narrow, store.is_resampled
    with whole_store(folder, *common) as saved:
        for sample in _distinct(store):
            saved.append(sample)
        if store.contour is not None:
            saved.contour = store.contour
        if posterior.calibration is not None:
            save_calibration(replace(posterior.calibration, samples=identify(saved.unrecorded or ())), saved)
        if novelty and posterior.novelty is not None:
            type(posterior)(saved, posterior.model).keep_novelty(posterior.novelty)
    return saved


def _distinct(store: SampleStore) -> Iterable[PosteriorSample]:
    """Yield each sample once; one that was drawn repeatedly, as by `resample`, has the sum of the weights."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for index, record in enumerate(store.records):
        places.setdefault((record.step, record.chain, record.draw), []).append(index)
    for indices in places.values():
        weights = torch.tensor([store.records[index].log_weight for index in indices], dtype=torch.float64)
        yield replace(store[indices[0]], log_weight=float(weights.logsumexp(0)) if len(indices) > 1 else weights.item())


def _means(store: SampleStore) -> dict[str, Tensor]:
    """Return the plain mean of each float32 parameter over the samples."""
    sums: dict[str, Tensor] = {}
    for sample in store:
        for name, parameter in sample.parameters.items():
            if parameter.dtype == torch.float32:
                sums[name] = sums[name] + widest(parameter) if name in sums else widest(parameter)
    return {name: (total / len(store)).float() for name, total in sums.items()}


# -- the Hugging Face Hub ----------------------------------------------------------------------------------------------

SCHEME = "hf://"
FILES = ("sample-*.safetensors", "shared.safetensors", "base.safetensors", "contour.safetensors", "calibration.json")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
LARGEST_RESULTS = 2**24
"""In bytes."""
LOCAL = re.compile(r"(?<![\w:/.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+~-]+){2,}[/\\]?")
"""Paths of a machine, which a card does not show."""


def _hub(what: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{what} needs huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub


def _name_of(repository: str, argument: str) -> str:
    name = str(repository).removeprefix(SCHEME)
    if not REPOSITORY.fullmatch(name):
        raise ValueError(f"{argument}={repository!r} is not the name of a repository: write 'owner/name'")
    return name


def push(
    posterior: Any, repository: str, dtype: Any, base: str | None, private: bool | None, run: str | Path | None
) -> str:
    """Upload a posterior; see `Posterior.push_to_hub`."""
    name = _name_of(repository, "repo_id")
    if "@" in name:
        raise ValueError(f"repo_id={repository!r} names a revision, and samples go to the newest: leave '@…' out")
    hub = _hub("push_to_hub")
    results = _results_of(posterior, run)
    with TemporaryDirectory() as folder:
        saved = save_samples(posterior, Path(folder) / "samples", dtype, base, novelty=False)
        (saved.path / "README.md").write_text(card(name, saved, posterior.calibration, results), encoding="utf-8")
        hub.create_repo(repo_id=name, private=private, exist_ok=True)
        message = f"{len(saved)} samples by lightning-sgmcmc {version('lightning-sgmcmc')}"
        hub.upload_folder(
            repo_id=name, folder_path=str(saved.path), commit_message=message, delete_patterns=list(FILES)
        )
    return f"{SCHEME}{name}"


def pulled(address: str) -> Path:
    """Return a local folder with the store of a repository, `hf://owner/name` or `hf://owner/name@revision`.

    The files of the Hub's cache are links, which a store does not follow, so the folder has hard links to their
    targets, or copies.
    """
    name, _, revision = _name_of(address, "path").partition("@")
    hub = _hub(f"Posterior.load({address!r})")
    snapshot = Path(hub.snapshot_download(repo_id=name, revision=revision or None, allow_patterns=[MANIFEST, *FILES]))
    if not (snapshot / MANIFEST).exists():
        raise FileNotFoundError(f"{address} has no {MANIFEST}: it is not a posterior of push_to_hub")
    folder = Path(hub.constants.HF_HUB_CACHE).parent / "lightning-sgmcmc" / name.replace("/", "--") / snapshot.name
    if (folder / MANIFEST).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    files = [file for pattern in FILES for file in snapshot.glob(pattern)]
    for file in (*files, snapshot / MANIFEST):  # the manifest last, so that it names complete files
        original, copy = file.resolve(), folder / file.name
        copy.unlink(missing_ok=True)
        try:
            os.link(original, copy)
        except OSError:  # another file system
            shutil.copyfile(original, copy)
    return folder


# -- the card ----------------------------------------------------------------------------------------------------------


def _results_of(posterior: Any, run: str | Path | None) -> dict[str, Any]:
    """Return what `results.json` of a run says, {} without one."""
    store = posterior.store.source if isinstance(posterior.store, StoreView) else posterior.store
    folder = Path(run) if run is not None else store.path.parent if isinstance(store, DiskStore) else None
    if folder is None:
        return {}
    try:
        found = parse_json(read_regular(folder / "results.json", LARGEST_RESULTS))
    except (OSError, ValueError) as error:
        if run is not None:
            raise ValueError(f"run={str(run)!r} has no readable results.json: {error}") from error
        return {}
    return found if isinstance(found, dict) else {}


def card(name: str, store: DiskStore, calibration: Any, results: dict[str, Any]) -> str:
    """Return the text of a repository's README.md."""
    said = summary(store.records)
    parts = [
        "---\nlibrary_name: lightning-sgmcmc\ntags: [bayesian, sgmcmc, uncertainty]\n---\n",
        f"# {name.partition('/')[2]}\n",
        f"{said[0].upper()}{said[1:]}, of a network's weights. Predictions average over them.\n",
        f'```python\nfrom lightning_sgmcmc import Posterior\n\nposterior = Posterior.load("{SCHEME}{name}")\n'
        "prediction = posterior.predict(x)\n```\n",
        "## The run\n",
        *(["What the run's summary said, of all its samples:\n"] if results else []),
        *_said_of_run(results),
        f"* calibrated by: {calibration if calibration is not None else 'nothing'}",
        *_model(store.model_description),
        f"* parameters: {store.narrow.dtype if store.narrow is not None else 'as sampled'}",
        f"* versions: {_versions(results)}\n",
        *_metrics(results),
    ]
    return "\n".join(parts) + "\n"


def _said_of_run(results: dict[str, Any]) -> list[str]:
    said = results.get("sentences")
    said = said if isinstance(said, dict) else {}
    verdict = results.get("verdict")
    found = {
        "name": results.get("recipe"),
        "kind": results.get("kind"),
        **{name: said.get(name) for name in ("quality", "gain", "calibration", "sampled")},
        "verdict": verdict.get("verdict") if isinstance(verdict, dict) else None,
    }
    return [f"* {name}: {without_paths(text)}" for name, text in found.items() if isinstance(text, str) and text]


def _model(description: Any) -> list[str]:
    """Return the classes of the network and the likelihood."""
    arguments = description.get("arguments") if isinstance(description, dict) else None
    if not isinstance(arguments, dict):
        return ["* network: not described; load with `net=…`"]
    classes = {name: part.get("class") for name, part in arguments.items() if isinstance(part, dict)}
    found = {name: classes.get(name) for name in ("net", "likelihood")}
    return [f"* {name}: `{path.rpartition(':')[2]}`" for name, path in found.items() if isinstance(path, str)]


def _versions(results: dict[str, Any]) -> str:
    origin = results.get("origin")
    versions = origin.get("versions") if isinstance(origin, dict) else None
    if not isinstance(versions, dict):
        versions = {one: version(one) for one in ("lightning-sgmcmc", "torch")}
    return ", ".join(f"{one} {without_paths(str(number))}" for one, number in versions.items())


def _metrics(results: dict[str, Any]) -> list[str]:
    rows = results.get("rows")
    entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    cells = [
        [str(row.get("method")), str(row.get("metric")), f"{row['value']:.4g}"]
        for row in entries
        if isinstance(row.get("value"), int | float)
    ]
    stage = {"test": "test", "val": "validation"}.get(str(results.get("stage")), "evaluation")
    return [f"## Metrics of the {stage} data\n", markdown_table(("method", "metric", "value"), cells)] if cells else []


def without_paths(text: str) -> str:
    """Return a text in one line, with paths of a machine left out.

    >>> without_paths("samples in /home/me/runs/a, 3 m/s and p/q")
    'samples in …, 3 m/s and p/q'
    """
    return " ".join(LOCAL.sub("…", text).split())
