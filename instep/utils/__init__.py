"""Small helpers that know nothing about training."""

__all__: list[str] = []  # internal: may change in any release
