"""Certificates of privacy that others can check: the writer, the auditor and the commands."""
