"""Tools on runs: audits, attacks, risk, recommendations, tuning, studies, reports and
applications.
"""
