"""Lightning, Transformers, Accelerate: attach, save and load with the framework's own checkpoints, close at the end.

Nothing is imported unless asked for: `import gradwire.integrations.lightning` needs Lightning, and so on.
"""
