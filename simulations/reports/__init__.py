"""Output for people: terminal tables, pictures, report pages and plans."""
