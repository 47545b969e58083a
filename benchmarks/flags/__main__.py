"""Prints docs/flags.md."""

from benchmarks.flags import document

print(document.markdown(), end='')
