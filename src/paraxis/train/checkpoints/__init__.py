"""Trees of arrays in a directory: written behind a run's back, checked leaf by leaf, kept by a policy."""
