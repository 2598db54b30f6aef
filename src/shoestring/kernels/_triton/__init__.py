"""Triton sources, apart from their callers: the package imports without triton."""
