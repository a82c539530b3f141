"""Models that leave a run: files in common formats, adapters, and predictions of exported
models.
"""
