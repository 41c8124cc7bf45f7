"""What can go wrong inside the simulator."""

from hybridep.errors import HybridEPError


class SimulationError(HybridEPError):
    """A simulation was asked for something that has no meaning (an event in the past, an unknown link, a cycle)."""
