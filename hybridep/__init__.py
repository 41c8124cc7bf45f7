"""HybridEP: exact expert parallelism across datacenters, with experts and tokens both allowed to travel."""

__version__ = "0.1.0"
