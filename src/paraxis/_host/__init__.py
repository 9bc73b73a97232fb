"""This process and its machine: files put in place whole, signals, threads, and what several processes agree on."""
