"""A run's privacy statement as a page: for evaluators, for a model card, and for a public registry
of deployments.
"""
