"""The common part of front ends that take Flax NNX modules: modules taken apart, named, noticed where not given."""
