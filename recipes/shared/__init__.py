"""Code that several recipes use."""
