"""The baselines of the LaDP-FL paper, and its method as published. The sound form of the method is
`fedlgm.mechanisms.ladp`.
"""
