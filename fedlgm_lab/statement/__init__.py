"""A run's privacy statement in the forms for evaluators, for a model card and for a public registry
of deployments.
"""
