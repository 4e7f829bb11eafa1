"""The papers' experiments: each has its settings in one place and ends with pictures and a table."""
