"""From documents to passages to hits."""
