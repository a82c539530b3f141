"""A deployment's server side: real nodes behind Flower's Grid, each asked for its signed release.

A strategy uses `grid`. Behind it, `polling` sends `questions` over `link` to the nodes of `enrolment`, waits, and
accepts the replies that pass the checks of `answers`. The nodes' side is `clients.node`.
"""
