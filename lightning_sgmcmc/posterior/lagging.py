"""A store on disk whose files are written while the device continues."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_sgmcmc.chains.sample import PosteriorSample, SampleRecord
from lightning_sgmcmc.chains.transfers import HostCopies
from lightning_sgmcmc.contour.contour import ContourState
from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.posterior.disk import CONTOUR, DiskStore
from lightning_sgmcmc.posterior.writing import BackgroundWriter, write_sample


class LaggingStore(DiskStore):
    """The store of a running fit: samples may be queued, and a thread copies them from the device and writes them.

    Whoever reads the records waits until all samples in the queue are on the disk, so a checkpoint, whose state has
    the records, refers to no other samples. An error of the thread is raised by the next `append_later`, and by every
    reader until `close`.

    Args:
        path: an existing store's folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._writer: BackgroundWriter | None = None
        super().__init__(path)

    @property
    def records(self) -> list[SampleRecord]:
        """The samples' records, once all of them are on the disk."""
        self._settle()
        return self._records

    @records.setter
    def records(self, records: list[SampleRecord]) -> None:
        self._records = records

    @property
    def lags(self) -> bool:
        """Whether samples are queued whose records are not read yet."""
        return self._writer is not None and len(self._writer) > 0

    def append_later(self, sample: PosteriorSample, copy: Callable[[], PosteriorSample]) -> None:
        """Queue a sample.

        Args:
            sample: the sample, on any device.
            copy: waits for the device, and returns the sample in host memory; called in the thread.

        Raises:
            ValueError: if the store has a sample of this step and chain.
            OSError: if an earlier one could not be written.
        """
        self._take_place(sample)
        writer = self._open_writer()
        earlier = len(self._records) + len(writer)
        size = sum(tensor.numel() * tensor.element_size() for tensor in sample.own_state.values())
        try:
            writer.submit(lambda: partial(self._enter, write_sample(self.path, copy(), earlier)), size)
        except OSError:
            self._places.discard((sample.step, sample.chain, sample.draw))
            raise

    def set_contour_later(self, contour: LearnedContour) -> None:
        """Queue the state learned by a contour sampler."""
        copies = HostCopies(contour.state)

        def write() -> Callable[[], None]:
            content = LearnedContour(contour.contour, ContourState(*copies.wait())).to_bytes()
            write_atomically(self.path / CONTOUR, content)
            return partial(setattr, self, "_contour", content)

        self._open_writer().submit(write, 0)

    def _enter(self, record: SampleRecord) -> None:
        self._records.append(record)  # the getter would settle again
        self._verified.add(record.file)

    def _open_writer(self) -> BackgroundWriter:
        if self._writer is None:
            self._writer = BackgroundWriter(self.path)
        return self._writer

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.settle()

    def reload(self) -> None:
        self._settle()
        super().reload()

    def close(self) -> None:
        """Wait for the queue, and end the thread; later samples begin another one.

        Raises:
            OSError: if a sample could not be written.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        finally:
            self._forget_lost()

    def __getstate__(self) -> dict[str, object]:
        self._settle()
        return self.__dict__ | {"_writer": None}
