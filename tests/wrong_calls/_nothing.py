"""A script that does nothing, to be launched."""
