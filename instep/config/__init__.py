"""The settings of a launch: what they are, where each came from, and the job that they make."""
