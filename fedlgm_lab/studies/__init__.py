"""Studies: runs of many settings, and statistics that compare their figures."""
