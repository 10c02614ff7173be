"""The tables of metrics; each module is one dialect, a tuple of families over the snapshot."""
