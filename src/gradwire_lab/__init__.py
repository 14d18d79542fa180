"""gradwire's laboratory: commands, benchmarks, built-in workloads, test networks, the emulated switch and the simulator.

It uses the library, and the library never imports it. Importing it registers what the library then finds by name.
"""

from gradwire.registry import register

register("aggregator", "switch", "gradwire_lab.switch:Switch")
register("codec", "truncate", "gradwire_lab.schemes.baselines:Truncate")
register("codec", "zlib", "gradwire_lab.schemes.baselines:ZlibCodec")
register("codec", "zstd", "gradwire_lab.schemes.baselines:ZstdCodec")
register("scheme", "periodic", "gradwire_lab.schemes.baselines:Periodic")
register("scheme", "truncate", "gradwire_lab.schemes.baselines:truncate_ring")
register("scheme", "zlib", "gradwire_lab.schemes.baselines:zlib_ring")
register("scheme", "zstd", "gradwire_lab.schemes.baselines:zstd_ring")
