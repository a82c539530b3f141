"""Human-readable output: terminal tables, pictures, report pages and plans."""
