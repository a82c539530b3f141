"""What a release will be: facts of the run, layers, bounds, trust, charging and the plan itself."""
