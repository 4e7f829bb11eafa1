"""The file of a store's shared tensors: what is not sampled, once beside the samples."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from lightning_sgmcmc.files import is_regular, write_atomically
from lightning_sgmcmc.posterior.aside import aside_folders
from lightning_sgmcmc.posterior.sample_file import checksum, opened, read_sample_file

SHARED = "shared.safetensors"


def write_shared(folder: Path, tensors: Mapping[str, Tensor]) -> str | None:
    """Write the shared tensors, and return the checksum of their file; without any, write nothing and return None.

    Args:
        folder: the store's.
        tensors: by name.

    Raises:
        OSError: if the file cannot be written.
    """
    if not tensors:
        return None
    apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    content = save(apart)
    write_atomically(folder / SHARED, content)
    return checksum(content)


def read_shared(folder: Path, expected: str) -> dict[str, Tensor]:
    """Return the shared tensors by name.

    Args:
        folder: the store's.
        expected: the checksum of the file.

    Raises:
        ValueError: if the file is missing or damaged.
    """
    path = folder / SHARED
    try:
        for place in (folder, *aside_folders(folder)):  # a later fit may have moved the store aside
            if is_regular(place / SHARED) and checksum(content := read_sample_file(place / SHARED)) == expected:
                return load(content)
        raise OSError("its checksum differs from the manifest's" if path.exists() else "there is no such file")
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path}, the weights that were not sampled, is missing or damaged: {error}; without it no sample is a "
            "whole network, so restore the file"
        ) from error


def shared_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the shared tensors by name; only the file's header is read.

    Raises:
        ValueError: if the file is missing or damaged.
    """
    path = folder / SHARED
    try:
        with opened(path) as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise ValueError(f"{path}, the weights that were not sampled, is missing or damaged: {error}") from error
