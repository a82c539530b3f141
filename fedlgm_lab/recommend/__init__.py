"""Advice on the mechanism for a model: scores from public examples, without a run and without
spending budget.
"""
