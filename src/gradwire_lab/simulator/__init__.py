"""A discrete-event simulator of data-parallel training: what a scheme would do at scales that nobody here has.

The model and its limits: docs/simulator.md.
"""

from importlib.util import find_spec

from gradwire.errors import Unsupported

if find_spec("simpy") is None:
    raise Unsupported("the simulator needs simpy; pip install 'gradwire[sim]'")
