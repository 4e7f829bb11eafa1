"""The end of a command: its exit code, and a user's mistake in one sentence."""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_sgmcmc.cli.sentences import printable, sentence

FAILED, MISTAKE, NO_SAMPLES = 1, 2, 3

EXIT_CODES = """\
exit codes:
  0    the command has succeeded
  1    the run failed or was interrupted after its first step
  2    the command, its configuration, data or folders are wrong; nothing was run
  3    the run ended without a posterior sample
  143  SIGTERM ended the run"""

EXPECTED = (ValueError, TypeError, RuntimeError, OSError, ImportError, LookupError, MisconfigurationException)
"""Types of errors that a user's mistake can have; another one is a fault of the program and shows its traceback."""


class Mistake(Exception):
    """A user's mistake; its message is for the user."""


class NoSamplesError(Exception):
    """Raised if a run ends without a posterior sample."""


@contextmanager
def one_sentence(command: str, debug: bool = False, steps: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Print a user's mistake as one sentence and exit with its code; other errors pass.

    An error after the first step was made is a mistake only if this package raised it, since a run that failed in other
    code cannot be repeated soon to see the traceback.

    Args:
        command: how the user called the command; the sentence begins with it.
        debug: print the traceback instead.
        steps: returns the number of steps that the run has made.

    Raises:
        SystemExit: with the code of `EXIT_CODES`.
    """
    try:
        yield
    except Exception as error:
        begun = steps() > 0
        known = isinstance(error, Mistake | NoSamplesError | argparse.ArgumentError)
        if debug:
            traceback.print_exc()
        elif known or (isinstance(error, EXPECTED) and (not begun or _is_raised_here(error))):
            print(printable(f"{command}: {sentence(error)}"), file=sys.stderr)
            if not known:
                print("(--debug shows where it was raised)", file=sys.stderr)
        else:
            raise
        raise SystemExit(NO_SAMPLES if isinstance(error, NoSamplesError) else FAILED if begun else MISTAKE) from None


def _is_raised_here(error: Exception) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("lightning_sgmcmc")
