"""What surrounds a fit: checks, guards, checkpoints, exact resume, folders, loggers, the progress bar."""
