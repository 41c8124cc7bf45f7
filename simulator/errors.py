"""What can go wrong inside the simulator."""

from hybridep.errors import HybridEPError, UserError


class SimulationError(HybridEPError):
    """A simulation was asked for something that has no meaning (an event in the past, an unknown link, a cycle)."""


class StuckError(SimulationError):
    """A simulation cannot end: an exchange waits for itself, or for links that are cut."""


class CutLinkError(UserError, StuckError):
    """A step waits for links that the conditions cut for good."""


class FabricError(UserError, SimulationError):
    """A fabric does not fit the cluster that it is to join."""


class PipelineError(UserError, SimulationError):
    """A cluster or a model cannot be cut into these pipeline stages, or a pipeline is not simulated under these conditions."""
