"""Paragraphs of installed packages' documentation, as tokens."""

import ast
import importlib.util
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sgmcmc.recipes.lora_text.settings import Settings

TRUNK = ("torch", "numpy", "sklearn", "matplotlib")
NEW = ("torchvision", "torchmetrics", "wandb", "pytorch_lightning")


class Paragraphs(Dataset[Any]):
    """Rows of tokens with their labels, read in whole batches."""

    def __init__(self, ids: Tensor, labels: Tensor) -> None:
        self.columns = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def whole_batch(self, indices: Any) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        return {name: column[torch.as_tensor(indices)] for name, column in self.columns.items()}


def data_of(packages: Sequence[str], train: int, test: int, settings: Settings) -> tuple[Paragraphs, Paragraphs]:
    """Return training and test data with so many paragraphs of each package; neighbours in a file are in one part."""
    parts: tuple[list[tuple[list[str], int]], list[tuple[list[str], int]]] = ([], [])
    for label, package in enumerate(packages):
        found = list(itertools.islice(paragraphs(package), train + test))
        held_out = len(found) * test // (train + test)
        parts[0].extend((words, label) for words in found[held_out:])
        parts[1].extend((words, label) for words in found[:held_out])
    return tokens_of(parts[0], settings), tokens_of(parts[1], settings)


def paragraphs(package: str) -> Iterator[list[str]]:
    """Yield the different paragraphs of 12 to 80 words in the documentation strings of a package's source code."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    known = set()
    for path in sorted(Path(folders[0]).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        documented = (part for part in ast.walk(tree) if isinstance(part, ast.Module | ast.ClassDef | ast.FunctionDef))
        for text in (text for part in documented for text in re.split(r"\n\s*\n", ast.get_docstring(part) or "")):
            words = re.findall(r"[a-z]+", text.lower())
            if ">>>" not in text and 12 <= len(words) <= 80 and tuple(words) not in known:
                known.add(tuple(words))
                yield words


def tokens_of(labelled: Sequence[tuple[list[str], int]], settings: Settings) -> Paragraphs:
    """Return the paragraphs' first words as tokens, by their checksums; 0 pads."""
    ids = token_ids([words for words, _ in labelled], settings.length, settings.vocabulary)
    return Paragraphs(ids, torch.tensor([label for _, label in labelled]))


def token_ids(texts: Sequence[Sequence[str]], length: int, vocabulary: int) -> Tensor:
    """Return the first words of texts as tokens below `vocabulary`, by their checksums, shape (n, length); 0 pads."""
    ids = torch.zeros(len(texts), length, dtype=torch.int64)
    for place, words in enumerate(texts):
        tokens = [zlib.crc32(word.encode()) % (vocabulary - 1) + 1 for word in words[:length]]
        ids[place, : len(tokens)] = torch.tensor(tokens)
    return ids
