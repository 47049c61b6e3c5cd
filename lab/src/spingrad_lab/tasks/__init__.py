"""Data sets as training tasks, and the training of a network on one."""
