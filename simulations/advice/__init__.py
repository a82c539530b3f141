"""Which mechanism suits a model: scores from public examples, without a run and without budget."""
