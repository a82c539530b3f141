"""Reports for people: HTML pages, pictures, tables, summaries in notebooks and RO-Crates."""
