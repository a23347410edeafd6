"""A package, so that data workers find these files and not a package `tests` that somebody else installed."""
