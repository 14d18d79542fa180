"""What a run put on the wire and where its time went: recorder, sinks, report. Import the modules, not this package.

The sinks (`jsonl`, `tensorboard`, `chrome_trace`) and the report load their own dependencies, the recorder has none.
"""
