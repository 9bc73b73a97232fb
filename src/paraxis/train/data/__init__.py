"""From a source of rows to batches on the devices, in an order that a seed decides."""
