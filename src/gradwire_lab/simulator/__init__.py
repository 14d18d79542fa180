"""A discrete-event simulator of data-parallel training, on networks that nobody here has (docs/simulator.md)."""

from importlib.util import find_spec

from gradwire.errors import Unsupported

if find_spec("simpy") is None:
    raise Unsupported("the simulator needs simpy; in gradwire's clone: pip install '.[sim]'")
