"""The common part of front ends that take Flax NNX modules: modules split, merged and named."""
