"""What the front ends that take Flax NNX modules share: modules taken apart, named, noticed where not given."""
