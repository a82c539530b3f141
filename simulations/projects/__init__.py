"""Small projects that run at once: the files that `fedlgm new` writes."""
