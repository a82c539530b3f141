"""The LaDP-FL paper: its baselines, and its method as published. The sound form is
`fedlgm.mechanisms.ladp`.
"""
