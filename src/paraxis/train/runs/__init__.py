"""A run of steps from its beginning to its end: evaluated, saved, shown, stopped, resumed."""
