"""gradwire's laboratory: commands, benchmarks, built-in workloads, test networks, the emulated switch and the simulator.

It uses the library, and the library never imports it. Importing it registers what the library then finds by name.
"""

from gradwire.registry import register

register("aggregator", "switch", "gradwire_lab.switch:Switch")
register("scheme", "periodic", "gradwire_lab.schemes.baselines:Periodic")
register("scheme", "random-k", "gradwire_lab.schemes.random_k:RandomK")
register("scheme", "top-k-adam", "gradwire_lab.schemes.top_k_adam:TopKAdam")
register("scheme", "truncate", "gradwire_lab.schemes.baselines:TruncateRing")
register("scheme", "zlib", "gradwire_lab.schemes.baselines:ZlibRing")
register("scheme", "zstd", "gradwire_lab.schemes.baselines:ZstdRing")
