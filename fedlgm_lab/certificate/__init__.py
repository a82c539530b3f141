"""Certificates of privacy that third parties can check: the writer, the auditor and the
commands.
"""
