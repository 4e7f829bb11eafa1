"""Whole projects, as their users write them."""
