"""The figures that Mooncake's papers print, computed again: `mcjax figures` writes them to `docs/figures.md`."""
