"""A deployment's server side, which asks real nodes behind Flower's Grid for their signed releases.

A strategy uses `grid`. Behind it, `polling` sends `questions` over `link` to the nodes of
`enrolment`, waits, and accepts the replies that pass the checks of `answers`.
`fedlgm_nodes.service` is the nodes' side.
"""
