"""The experiments of the papers: settings in one place each, a table against the papers' figures, pictures."""
