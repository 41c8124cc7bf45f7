"""Starts processes: the emulated datacenters and the launcher."""
