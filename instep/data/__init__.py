"""Loaders whose every rank runs the same number of steps, counts every sample once, and resumes where it stopped."""
