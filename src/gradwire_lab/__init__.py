"""gradwire's laboratory: commands, benchmarks, built-in workloads, test networks, the emulated switch and the simulator.

It uses the library, and the library never imports it. Importing it registers what the library then finds by name.
"""

from gradwire.exchange import aggregators

aggregators.register("switch", "gradwire_lab.switch:Switch")
