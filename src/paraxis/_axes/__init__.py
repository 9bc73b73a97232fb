"""An axis, and where its elements lie: which devices it takes, how many rows each, padded by one rule."""
