"""From a loss function to steps on all devices: the state, its models, gradients, the update."""
