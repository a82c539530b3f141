"""The server of a deployment, which asks real nodes behind Flower's Grid for their signed releases.

A strategy uses `node_grid`, or `secure_grid` for secure sums. Through these modules, `polling`
sends `questions` over `link` to the nodes of `enrolment`, waits, and accepts the replies that pass
the checks of `answers`. `fedlgm_nodes.service` has the service that answers on each node.
"""
