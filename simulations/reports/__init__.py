"""What people read: terminal tables, pictures, report pages, plans."""
