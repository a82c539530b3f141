"""Parts of `benchmarks.gpu`: costs of private steps and of whole private rounds on a GPU."""
