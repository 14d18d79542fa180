"""Counts what a run puts on the wire and where its time goes: recorder and sinks. Import the modules, not this package.

The sinks (`jsonl`, `tensorboard`, `chrome_trace`) and the report load their own dependencies, the recorder has none.
"""
