"""A discrete-event simulator of data-parallel training, on networks that nobody here has (docs/simulator.md)."""

from importlib.util import find_spec

from gradwire.errors import needs_extra

if find_spec("simpy") is None:
    raise needs_extra("the simulator needs simpy", "sim")
