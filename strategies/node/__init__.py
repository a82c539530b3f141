"""A deployment's server side: real nodes behind Flower's Grid, each asked for its signed release.

`grid` is what a strategy sees; behind it `polling` asks and waits, over the `link` to the nodes that `enrolment` names,
what `questions` says, and counts the answers that pass `answers`. The nodes' side is `clients.node`.
"""
