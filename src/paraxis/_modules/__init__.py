"""What the front ends that take Flax NNX modules share: modules taken apart, named, and found where they hide."""
