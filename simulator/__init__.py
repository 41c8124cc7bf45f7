"""Flow-level simulation of a training step: what a plan would take on a cluster that need not exist."""
