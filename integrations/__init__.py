"""Adapters to other software: one folder each, imported only by those who use that software."""
