"""Streams: data that is read in sequence, from many files or from an iterable of another library.

`StreamDataset` is a data set of records in many files. Someone else's stream is divided over ranks and workers by
`DividedLoader`. README.md in this folder lists the files in reading order. Public names are in `instep.data`.
"""

__all__: list[str] = []
